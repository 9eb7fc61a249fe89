"""Choice of the ops that stay in fp32 in an fp16 program: those on integers.

This format holds indices, shapes and counters in floats. fp16 represents integers only up to 2048, so larger token ids,
sizes and loop counters would be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coremltools.converters.mil.mil import Block, Operation, Var, types

__all__ = ["WholeNumbers"]

_MOVES = frozenset({
    "identity", "reshape", "expand_dims", "squeeze", "transpose", "concat", "stack", "split", "slice_by_index",
    "slice_by_size", "gather", "gather_nd", "gather_along_axis", "tile", "reverse", "flatten2d", "pad",
})
_ARITHMETIC = frozenset({
    "add", "sub", "mul", "real_div", "floor_div", "mod", "floor", "ceil", "round", "maximum", "minimum", "clip",
    "select", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "cumsum", "fill", "range_1d", "abs", "sign",
})
_COMPARISONS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})


class WholeNumbers:
    """Says of each op whether it can be computed in fp16; the selector of coremltools' pass for precision.

    What is moved and computed on its way to a cast to integers, what is moved after a cast from integers, and numbers
    by themselves in loops and branches stay in fp32.
    """

    def __init__(self) -> None:
        self._kept: set[Operation] | None = None

    def __call__(self, op: Operation) -> bool:
        if self._kept is None:
            self._kept = _find_kept(_get_function(op))
        return op not in self._kept


def _get_function(op: Operation) -> Block:
    block = op.enclosing_block
    while block.outer_op is not None:
        block = block.outer_op.enclosing_block
    return block


def _find_kept(function: Block) -> set[Operation]:
    ops = [*_iterate_ops(function)]
    kept = {op for op in ops if op.op_type in _MOVES | _ARITHMETIC | _COMPARISONS and _is_number_in_block(op, function)}
    for op in reversed(ops):
        if op.op_type in _MOVES | _ARITHMETIC and any(
                _is_cast_to_int(child) or child in kept for var in op.outputs for child in var.child_ops):
            kept.add(op)
    moved: set[Operation] = set()
    for op in ops:
        if op.op_type in _MOVES and any(
                each.op in moved or _is_cast_from_int(each.op) for each in _iterate_inputs(op) if each.op is not None):
            moved.add(op)
    return kept | moved


def _iterate_ops(block: Block) -> Iterator[Operation]:
    for op in block.operations:
        for inner in op.blocks:
            yield from _iterate_ops(inner)
        yield op


def _iterate_inputs(op: Operation) -> Iterator[Var]:
    for value in op.inputs.values():
        yield from value if isinstance(value, (list, tuple)) else [value]


def _is_number_in_block(op: Operation, function: Block) -> bool:
    values = [*op.outputs, *_iterate_inputs(op)]
    return op.enclosing_block is not function and all(
        not types.is_tensor(var.sym_type) or tuple(var.shape) in ((), (1,)) for var in values)


def _is_cast_to_int(op: Operation) -> bool:
    return bool(op.op_type == "cast" and types.is_int(op.outputs[0].dtype))


def _is_cast_from_int(op: Any) -> bool:
    return bool(op.op_type == "cast" and types.is_int(op.x.dtype) and types.is_float(op.outputs[0].dtype))
