"""Replace values that are inferred during conversion by constants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.coremltools_internals import get_typed_value
from ...ir.query import get_consumers, get_flat_inputs, get_itemsize, get_type_info
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example
from ...rules.control_flow import DataDependentShape
from ...rules.dtypes import Int32Ops
from ._compile_time_constants import Float64Values, count_output_bytes, is_compile_time_constant

_MAX_GROWN_BYTES = 4096
"Maximum bytes of a constant that is larger than the values it is computed from."


class FoldConstants(BlockRewrite):
    """Fold index and shape arithmetic with constant results.

    why     int32 is unsupported on the ANE: each op on it runs on the CPU. Sizes from static shapes, unrolled counters
            and indices computed from constants are known at conversion.
    when    Ops whose result coremltools infers from constants and static shapes: integers, bools, and floats that are
            only moved, or integers that a float represents. Results of float computations that round are skipped.
            Weights are not folded: compressed values are not decompressed, a result has at most `max_bytes`, and a
            result larger than its operands at most 4096 bytes. Ops whose result is an output of the model stay.
    exact   bitwise: integer arithmetic does not round, and folded float ops do not either.
    cost    the bytes of the constants; ops without other users are removed.

    before
        %0: int32[3] = shape(x=%x)
        %1: int32[1] = slice_by_index(x=%0, begin=[0], end=[1])
        %2: int32[2] = concat(values=(%1, [-1]), axis=0)
        %y: fp16[2, 12] = reshape(x=%x, shape=%2)
    after
        %y: fp16[2, 12] = reshape(x=%x, shape=[2, -1])
    """

    code, slug = "ANE258", "known-at-conversion"
    fixes = (Int32Ops, DataDependentShape)
    stage, after = "structure", ("fold_constant_gather",)
    exactness = Exactness.BITWISE
    preset = "full"
    repeats = True
    evidence = (
        cite_m4_study("any arithmetic on int32 is unsupported"),
    )

    max_bytes: int = 65536
    "Maximum bytes of one new constant."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        foldable, values = set[Operation](), Float64Values()
        for op in block.operations:
            if (
                op.op_type == "const"
                or any(get_typed_value(var) is None for var in op.outputs)
                or not _is_internal(op)
            ):
                continue
            if not is_compile_time_constant(op, math.inf) or not values.are_exact_in_float64(op):
                continue
            allowed = max(_MAX_GROWN_BYTES, sum(map(_count_bytes, get_flat_inputs(op))))
            if count_output_bytes(op) <= min(self.max_bytes, allowed):
                foldable.add(op)
            else:
                yield Miss(op, f"its value has {count_output_bytes(op)} bytes, more than its operands or than "
                               f"{self.max_bytes} (max_bytes)")
        for op in block.operations if foldable else ():
            if op in foldable and any(_is_read_elsewhere(var, foldable) for var in op.outputs):
                yield Hit(op, note=f"{op.op_type} of constants")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return {var: _build_known_const(mb, var) for var in hit.op.outputs}

    def examples(self) -> Iterable[Example]:
        yield make_example("a size from a shape", _build_flattened, opset=ct.target.iOS16, x=(2, 3, 4))
        yield make_example(
            "indices",
            lambda x: Builder.gather(
                x=x, axis=1, indices=Builder.add(x=np.array([0, 1], np.int32), y=np.int32(1)), name="y"
            ),
            x=(2, 3),
        )
        yield make_example(
            "mask",
            lambda x: Builder.select(
                cond=Builder.less(x=np.arange(8, dtype=np.int32), y=np.int32(2)), a=x, b=np.float16(0), name="y"
            ),
            x=(2, 8),
        )
        yield make_example(
            "positions",
            lambda x: Builder.mul(
                x=x,
                y=Builder.cast(x=Builder.mul(x=np.arange(8, dtype=np.int32), y=np.int32(7)), dtype="fp16"),
                name="y",
            ),
            x=(2, 8),
        )
        yield make_example(
            "parts",
            lambda x: [
                Builder.add(x=x, y=part)
                for part in Builder.split(x=np.arange(16, dtype=np.float16).reshape(1, 16), num_splits=2, axis=1)
            ],
            x=(2, 8),
        )
        yield make_example(
            "large",
            lambda x: Builder.add(x=x, y=Builder.fill(shape=[64, 64], value=np.float16(2)), name="y"),
            reason="its value has 8192 bytes, more than its operands or than 65536 (max_bytes)",
            x=(64, 64),
        )
        yield make_example(
            "computed floats",
            lambda x: Builder.add(x=x, y=Builder.exp(x=np.ones(3, np.float16)), name="y"),
            reason="",
            x=(2, 3),
        )
        yield make_example(
            "moved after it was rounded",
            lambda x: Builder.add(
                x=x,
                y=Builder.reshape(x=Builder.mul(x=np.full(3, 0.3, np.float16), y=np.float16(0.3)), shape=[1, 3]),
                name="y",
            ),
            reason="",
            x=(2, 3),
        )
        yield make_example(
            "a size by a float",
            lambda x: Builder.mul(
                x=x, y=Builder.reduce_max(x=Builder.fill(shape=_build_scaled_sizes(x), value=np.float16(2))), name="y"
            ),
            x=(2, 12),
        )
        yield make_example(
            "flexible",
            lambda x: Builder.cast(
                x=Builder.gather(x=Builder.shape(x=x), indices=np.int32(0), axis=0), dtype="fp16", name="y"
            ),
            reason="",
            x=(None, 3),
        )


def _is_internal(op: Operation) -> bool:
    """Return whether no output of `op` is an output of the model."""
    return not any(isinstance(block, Function) for var in op.outputs for block in var.consuming_blocks)


def _is_read_elsewhere(var: Var, foldable: set[Operation]) -> bool:
    return bool(var.consuming_blocks) or any(reader not in foldable for reader in get_consumers(var))


def _count_bytes(var: Var) -> int:
    """Count the bytes of a value; 0 for lists, strings and flexible values."""
    shape = get_type_info(var).shape if types.is_tensor(var.sym_type) else None
    return 0 if shape is None else int(np.prod(shape, dtype=np.int64)) * get_itemsize(var)


def _build_known_const(mb: RewriteBuilder, var: Var) -> Var:
    value = np.asarray(var.val)
    const: Var = mb.once(("known", var.dtype, var.rank, value.shape, value.tobytes()),
                         lambda: mb.const(val=var.val, name=f"{var.name}_known"))
    return const


def _build_flattened(x: Var) -> Any:
    rows = Builder.slice_by_index(x=Builder.shape(x=x), begin=[0], end=[1])
    return Builder.reshape(x=x, shape=Builder.concat(values=[rows, np.array([-1], np.int32)], axis=0), name="y")


def _build_scaled_sizes(x: Var) -> Any:
    """Build the sizes of x times 1.5 and 2 / 3, as torch computes them."""
    scaled = Builder.mul(x=Builder.cast(x=Builder.shape(x=x), dtype="fp32"), y=np.array([1.5, 2 / 3], np.float32))
    return Builder.cast(x=Builder.floor(x=scaled), dtype="int32")
