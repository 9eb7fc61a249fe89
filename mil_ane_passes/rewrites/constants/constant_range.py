"""Replace the numbers of a range by a constant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_m4_study, cite_xcode_notes
from ...passes.examples import build_program
from ...rules.unsupported_ops import Range1d
from ._generated_constants import (
    AxisSize,
    build_shared_const,
    cut_const_to_length,
    describe_size_excess,
    extract_axis_line,
    find_float_casts,
    replace_float_casts,
    trace_shape_sources,
)


class ConstantRange(BlockRewrite):
    """Hold the numbers of range_1d in a constant; of a length known only at run time, take the first of them.

    why     range_1d, which torch.arange becomes, runs on the CPU only, and with it the arithmetic on its integers.
    when    start, end and step are known; or, with `longest`, a range from 0 in steps of 1 whose end is the length of
            an axis of another value, of floating point itself or only cast to it. Numbers that the type of
            the range has to round are left alone, as are ranges of no elements.
    exact   bitwise. The first n of N numbers are what is left when n elements (of the value whose axis it is, none of
            which is read) are joined to them, and N elements cut off the end: both have fixed parameters, where a slice
            with a computed end leaves the ANE. A run with an axis longer than `longest` would be wrong.
    cost    the numbers; for a length known at run time a slice, a concat and a slice on as few elements, and a cast at
            the edge where the length is that of integers.

    before
        %0: int32[2] = shape(x=%x)
        %1: int32 = gather(x=%0, indices=1)
        %2: int32[s0] = range_1d(end=%1, start=0, step=1)
        %relu_0: fp16[2, s0] = relu(x=%x)
        %y: fp16[s0] = cast(x=%2, dtype=fp16)
    after
        %0: fp16[1, s0] = slice_by_index(x=%x, begin=[0, 0], end=[1, 0], end_mask=[False, True])
        %1: fp16[s0] = reshape(x=%0, shape=[-1])
        %2: fp16[s1] = concat(values=(<fp16[64]>, %1), axis=0)
        %y: fp16[s2] = slice_by_index(x=%2, begin=[0], end=[-64], end_mask=[False])
        %relu_0: fp16[2, s3] = relu(x=%x)
    """

    fixes = (Range1d,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("range_1d",)
    evidence = (
        cite_m4_study("range_1d is unsupported, and runs on no GPU either; slice_by_index and concat are accepted"),
        cite_xcode_notes("range_1d, which is torch.arange, runs on the CPU only"),
    )

    longest: int = 0
    "The longest range of dynamic length that is replaced; 0 skips such ranges."
    max_bytes: int = 1 << 20
    "The most bytes of one constant."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type == "range_1d":
                yield self._match_op(op)

    def _match_op(self, op: Operation) -> Hit | Miss:
        start, end, step = (get_const_value(op.inputs[name]) for name in ("start", "end", "step"))
        if start is None or step is None or is_symbolic(start) or is_symbolic(step):
            return Miss(op, "its start or step is known only at run time")
        count = op.outputs[0].shape[0]
        if end is None or is_symbolic(count):
            return self._match_flexible(op, start, step)
        if count < 1:
            return Miss(op, "a range of no elements cannot be stored")
        kind = op.outputs[0].dtype
        return self._reject_if_too_large(op, int(count), kind) or self._held(
            op, start + np.arange(int(count), dtype=np.float64) * step, kind, f"{count} numbers")

    def _match_flexible(self, op: Operation, start: float, step: float) -> Hit | Miss:
        found = trace_shape_sources(op.end)
        size = found[0] if found and len(found) == 1 else None
        if not isinstance(size, AxisSize):
            return Miss(op, "its end is computed, and not the length of an axis")
        if (start, step) != (0, 1):
            return Miss(op, f"from {start:g} in steps of {step:g} to a length known at run time; from 0 by 1 it could "
                            "be cut from a constant")
        if self.longest < 1:
            return Miss(op, "its end is a length known only at run time; with longest=N a constant of N is cut to it")
        whole = types.is_int(op.outputs[0].dtype)
        ends = find_float_casts(op) if whole else None
        if whole and ends is None:
            return Miss(op, "its numbers are read as integers, which are unsupported on the ANE")
        kind = ends.kind if ends else op.outputs[0].dtype
        return self._reject_if_too_large(op, self.longest, kind) or self._held(
            op, np.arange(self.longest, dtype=np.float64), kind, f"up to {self.longest} numbers", ends, size)

    def _reject_if_too_large(self, op: Operation, count: int, kind: Any) -> Miss | None:
        """Return a miss where `count` numbers of `kind` are too large, else None.

        The numbers are not made, as a package may declare any count.
        """
        size = count * np.dtype(types.nptype_from_builtin(kind)).itemsize
        return Miss(op, describe_size_excess(size, self.max_bytes)) if size > self.max_bytes else None

    def _held(
        self, op: Operation, numbers: Any, kind: Any, note: str, ends: Any = None, size: AxisSize | None = None,
    ) -> Hit | Miss:
        """Return the hit, or a miss where `kind` cannot represent `numbers`."""
        held = numbers.astype(types.nptype_from_builtin(kind))
        if not np.array_equal(held.astype(np.float64), numbers):
            return Miss(op, f"{types.builtin_to_string(kind)} does not hold all of its numbers")
        return Hit(op, note=note, kind=kind, numbers=numbers, ends=ends, size=size,
                   largest_size=math.inf if size is None else self.longest)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        dtype = types.nptype_from_builtin(hit.kind)
        numbers = hit.numbers.astype(dtype)
        made = build_shared_const(mb, ("numbers", len(numbers), dtype.__name__, numbers.tobytes()), lambda: numbers)
        if hit.size is not None:
            like = extract_axis_line(mb, hit.size, 1, 0)
            like = like if like.dtype == hit.kind else mb.cast(x=like, dtype=types.builtin_to_string(hit.kind))
            made = cut_const_to_length(mb, made, like, 0)
        return replace_float_casts(mb, hit.ends, made) if hit.ends else {hit.op.outputs[0]: made}

    def examples(self) -> Iterable[Example]:
        yield Example("of the length of an axis", _build_positions, options={"longest": 64})
        yield Example("fixed", lambda: _build_range(np.float16(1), np.float16(4), np.float16(0.5)))
        yield Example("integers", lambda: _build_range(np.int32(0), np.int32(12), np.int32(2), cast=True))
        yield Example("downwards", lambda: _build_range(np.float16(3), np.float16(-3), np.float16(-1)))
        yield Example("no bound", _build_positions, reason=(
            "its end is a length known only at run time; with longest=N a constant of N is cut to it"))
        yield Example("too long for fp16", _build_positions, options={"longest": 3000},
                      reason="fp16 does not hold all of its numbers")
        yield Example("tenths", lambda: _build_range(np.float16(0), np.float16(0.55), np.float16(0.1)),
                      reason="fp16 does not hold all of its numbers")


def _build_range(start: Any, end: Any, step: Any, cast: bool = False) -> Program:
    def body(x: Var) -> list[Var]:
        counted = Builder.range_1d(start=start, end=end, step=step)
        row = Builder.expand_dims(x=Builder.cast(x=counted, dtype="fp16") if cast else counted, axes=[0], name="y")
        return [row, Builder.relu(x=x)]

    return build_program(body, x=(2, 3))


def _build_positions() -> Program:
    """Build the ops that torch.arange(x.shape[1]).half() is converted to."""
    def body(x: Var) -> list[Var]:
        length = Builder.gather(x=Builder.shape(x=x), indices=np.int32(1), axis=0)
        counted = Builder.range_1d(start=np.int32(0), end=length, step=np.int32(1))
        return [Builder.relu(x=x), Builder.cast(x=counted, dtype="fp16", name="y")]

    return build_program(body, x=(2, None))
