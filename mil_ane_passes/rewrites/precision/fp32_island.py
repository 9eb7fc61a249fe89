"""Move data in fp16 if the fp32 ops only move it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.clone import clone_op, infer_outputs, map_inputs
from ...ir.large_values import list_groups, merge_groups
from ...ir.query import DATA_MOVEMENT_OPS, get_consumers, get_flat_inputs, is_const, is_const_or_compressed, is_opaque
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.examples import make_example, make_op_example
from ...rules.dtypes import Fp32ComputeLeft
from ...utils.text_format import format_count
from ._fp16_conversion import is_cast_to_fp16

_MOVING_OPS = DATA_MOVEMENT_OPS | {"depth_to_space", "pixel_shuffle", "pixel_unshuffle", "space_to_depth"}
_MAX_CONST_BYTES = 4096
"Largest size in bytes of an fp32 constant among the moved values that is stored in fp16 instead."


class Fp32Island(BlockRewrite):
    """Cast to fp16 before fp32 data movement instead of after it, which rounds equally.

    why     fp32 is unsupported on the ANE: such ops run on the CPU or GPU. In models with fp32 inputs, or partly in
            fp32, reshapes, slices and concats precede the cast to fp16.
    when    fp32 data movement ops whose results all end in casts to fp16: they move fp16 instead, and their operands
            are cast. A cast from fp16 to fp32 before them is removed. Not if more elements would be cast than before,
            as for a slice of a large input. Not for a constant that fp16 does not represent, or of more than 4096
            bytes. For fp32 computation see ane::fp16_compute.
    exact   bitwise: each element is rounded once, as before.
    cost    none: half the bytes are moved.

    before
        %0: fp32[1, 2, 8] = expand_dims(x=%x, axes=[0])
        %1: fp32[2, 1, 8] = transpose(x=%0, perm=[1, 0, 2])
        %2: fp16[2, 1, 8] = cast(x=%1, dtype=fp16)
        %tanh_0: fp16[2, 1, 8] = tanh(x=%2)
    after
        %0: fp16[2, 8] = cast(x=%x, dtype=fp16)
        %1: fp16[1, 2, 8] = expand_dims(x=%0, axes=[0])
        %2: fp16[2, 1, 8] = transpose(x=%1, perm=[1, 0, 2])
        %tanh_0: fp16[2, 1, 8] = tanh(x=%2)
    """

    fixes = (Fp32ComputeLeft,)
    stage = "precision"
    after = ("fp16_compute",)
    exactness = Exactness.BITWISE
    preset = "full"

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        islands: dict[Operation, list[Operation]] = {}
        for op in _find_ops_before_casts(block):
            islands[op] = [op]
            for var in get_flat_inputs(op):
                if var.op in islands:
                    merge_groups(islands, var.op, op)
        yield from map(_match_island, list_groups(islands))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        halves, replaced = dict[Var, Var](), dict[Var, Var]()
        for op in hit.members:
            for var in get_flat_inputs(op):
                if var.dtype == types.fp32 and var not in halves:
                    halves[var] = _read_as_fp16(mb, var)
            with mb.at(op):
                outputs = mb.insert(infer_outputs(clone_op(op, map_inputs(op, halves)), op))
            halves.update(zip(op.outputs, outputs))
            for var in op.outputs:
                casts = filter(is_cast_to_fp16, get_consumers(var))
                replaced.update({cast.outputs[0]: halves[var] for cast in casts})
        return replaced

    def examples(self) -> Iterable[Example]:
        yield _make_moved_example("turned before it is cast", lambda x: Builder.transpose(
            x=Builder.expand_dims(x=x, axes=[0]), perm=[1, 0, 2]))
        yield _make_moved_example("split", lambda x: Builder.split(x=x, num_splits=2, axis=1))
        yield make_example("between two casts", _build_between_fp16, x=(2, 8))
        yield _make_moved_example("with a constant", lambda x: Builder.concat(
            values=[x, np.ones((1, 8), np.float32)], axis=0))
        yield _make_moved_example("a part of it", lambda x: Builder.slice_by_index(x=x, begin=[0, 0], end=[2, 3]),
                                  reason="16 elements would be cast instead of 6")
        yield _make_moved_example("computed", lambda x: Builder.exp(x=x), reason="")
        yield make_op_example("read in fp32", "reshape", (2, 8), {"shape": [4, 4]}, reason="", dtype=types.fp32)


def _find_ops_before_casts(block: Block) -> list[Operation]:
    """Find the ops that move fp32 and all of whose results end in casts to fp16, in program order."""
    ends: set[Operation] = set()
    for op in reversed(block.operations):
        if _is_fp32_data_movement(op) and not any(var.consuming_blocks for var in op.outputs):
            readers = [reader for var in op.outputs for reader in get_consumers(var)]
            if readers and all(is_cast_to_fp16(reader) or reader in ends for reader in readers):
                ends.add(op)
    return [op for op in block.operations if op in ends] if ends else []


def _is_fp32_data_movement(op: Operation) -> bool:
    if op.op_type not in _MOVING_OPS or is_opaque(op) or any(var.dtype != types.fp32 for var in op.outputs):
        return False
    return op.op_type != "gather" or is_const(op.indices)


def _match_island(members: list[Operation]) -> Hit | Miss:
    outputs = {var for op in members for var in op.outputs}
    operands = {var for op in members for var in get_flat_inputs(op) if var.dtype == types.fp32 and var not in outputs}
    obstacle = next((var for var in operands if is_const_or_compressed(var) and not _can_store_in_fp16(var)), None)
    if obstacle is not None:
        return Miss(members[0], f"it moves the constant '{obstacle.name}', which fp16 does not represent, or which is "
                                f"large")
    before = sum(_count_elements(var) for var in outputs if any(map(is_cast_to_fp16, get_consumers(var))))
    after = sum(_count_elements(var) for var in operands if not _is_cast_from_fp16(var) and not is_const(var))
    if after > before:
        return Miss(members[0], f"{after} elements would be cast instead of {before}")
    return Hit(members[0], note=f"{format_count(len(members), 'op')} that move fp32", members=members,
               covers=members)


def _can_store_in_fp16(var: Var) -> bool:
    """Return whether `var` is a small const whose numbers are all exact in fp16."""
    return is_const(var) and var.val.nbytes <= _MAX_CONST_BYTES and np.array_equal(
        _round_to_fp16(var), var.val, equal_nan=True)


def _round_to_fp16(var: Var) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        return np.asarray(var.val).astype(np.float16)


def _count_elements(var: Var) -> int:
    return math.prod(int(size) for size in var.shape if not is_symbolic(size))


def _is_cast_from_fp16(var: Var) -> bool:
    return var.op is not None and var.op.op_type == "cast" and bool(var.op.x.dtype == types.fp16)


def _read_as_fp16(mb: RewriteBuilder, var: Var) -> Any:
    """Return what the island reads in place of fp32 `var`."""
    if _is_cast_from_fp16(var):
        return var.op.x
    if is_const(var):
        return mb.once(("half", var), lambda: mb.const(val=_round_to_fp16(var)[()], name=f"{var.name}_fp16"))
    with mb.at(mb.find_insertion_point(var), var.name):
        return mb.once(("half", var), lambda: mb.cast(x=var, dtype="fp16"))


def _make_moved_example(name: str, move: Callable[[Var], Any], **settings: Any) -> Example:
    """Make an example of what `move` returns, cast to fp16."""
    def build_body(x: Var) -> list[Var]:
        moved = move(x)
        parts = moved if isinstance(moved, (list, tuple)) else [moved]
        return [Builder.tanh(x=Builder.cast(x=part, dtype="fp16")) for part in parts]

    return make_example(name, build_body, dtype=types.fp32, x=(2, 8), **settings)


def _build_between_fp16(x: Var) -> Any:
    turned = Builder.transpose(x=Builder.cast(x=Builder.tanh(x=x), dtype="fp32"), perm=[1, 0])
    return Builder.cast(x=Builder.concat(values=[turned, turned], axis=1), dtype="fp16", name="y")
