"""Chains of int32 ops that begin at bools and constants and end in floats: the ranges of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.op_groups import list_groups, merge_groups
from ...ir.query import get_const_value, get_consumers, get_flat_inputs, get_type_info, is_const, is_opaque

__all__ = ["COMPARISON_OPS", "DATA_INPUTS", "MAX_EXACT_INTEGER", "find_fp16_obstacle", "find_int32_chains"]

MAX_EXACT_INTEGER = 2048
"Magnitude up to which fp16 represents all integers."
COMPARISON_OPS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})
DATA_INPUTS = ("x", "y", "a", "b", "values")
"Inputs with the values that are computed with; the other inputs are parameters."
_DATA_MOVEMENT_OPS = frozenset({
    "concat", "expand_dims", "gather", "identity", "reduce_max", "reduce_min", "reshape", "reverse", "select",
    "slice_by_index", "slice_by_size", "split", "squeeze", "stack", "tile", "transpose",
})
IntegerRange = tuple[int, int]


def _multiply_ranges(op: Operation, ranges: list[IntegerRange]) -> IntegerRange | str:
    (low, high), (other, most) = ranges
    return "a product with negative numbers may be -0.0" if min(low, other) < 0 else (low * other, high * most)


def _sum_range(op: Operation, ranges: list[IntegerRange]) -> IntegerRange | str:
    axes = get_const_value(op.inputs.get("axes"))
    sizes = [op.x.shape[axis] for axis in (range(op.x.rank) if axes is None else axes)]
    if any(map(is_symbolic, sizes)):
        return "it sums as many as the input is long"
    count = math.prod(map(int, sizes))
    return ranges[0][0] * count, ranges[0][1] * count


_RANGE_ARITHMETIC: dict[str, Callable[[Operation, list[IntegerRange]], IntegerRange | str]] = {
    "add": lambda op, r: (r[0][0] + r[1][0], r[0][1] + r[1][1]),
    "sub": lambda op, r: (r[0][0] - r[1][1], r[0][1] - r[1][0]),
    "maximum": lambda op, r: (max(r[0][0], r[1][0]), max(r[0][1], r[1][1])),
    "minimum": lambda op, r: (min(r[0][0], r[1][0]), min(r[0][1], r[1][1])),
    "abs": lambda op, r: (0, max(map(abs, r[0]))),
    "mul": _multiply_ranges, "reduce_sum": _sum_range,
}


def find_int32_chains(block: Block) -> Iterable[list[Operation]]:
    """Find the groups of ops connected by int32 values, each in program order, including single ops."""
    group: dict[Operation, list[Operation]] = {}
    for op in block.operations:
        if op.op_type == "const" or not any(map(is_computed_int32, [*op.outputs, *get_flat_inputs(op)])):
            continue
        group[op] = [op]
        for var in get_flat_inputs(op):
            if var.op in group and is_computed_int32(var):
                merge_groups(group, var.op, op)
    return list_groups(group)


def is_computed_int32(var: Var) -> bool:
    """Return whether `var` is int32 and not a constant."""
    return not is_const(var) and not types.is_list(var.sym_type) and get_type_info(var).dtype == types.int32


def find_fp16_obstacle(members: Iterable[Operation]) -> str | None:
    """Return why the chain cannot be computed in fp16, or None where every integer of it is exact in fp16."""
    ranges: dict[Var, IntegerRange] = {}
    for op in members:
        for var in op.outputs:
            if is_computed_int32(var) and (var.consuming_blocks or not get_consumers(var)):
                return f"its integers are the output '{var.name}'"
        found = _compute_range(op, ranges)
        if isinstance(found, str):
            return found
        if max(map(abs, found)) > MAX_EXACT_INTEGER:
            return f"'{op.outputs[0].name}' may reach {max(map(abs, found))}, and fp16 counts up to {MAX_EXACT_INTEGER}"
        ranges.update(dict.fromkeys(op.outputs, found))
    return None


def _compute_range(op: Operation, ranges: Mapping[Var, IntegerRange]) -> IntegerRange | str:
    kind = op.op_type
    if kind == "cast" and op.x.dtype == types.bool:
        return 0, 1
    if is_opaque(op) or (kind == "gather" and not is_const(op.indices)):
        return f"a {kind} in it"
    given = [var for name in DATA_INPUTS for var in _list_vars(op.inputs.get(name))]
    unknown = next((var for var in given if is_computed_int32(var) and var not in ranges), None)
    if unknown is not None:
        return f"'{unknown.name}' may be any integer"
    read = [ranges[var] if var in ranges else _read_const_range(var) for var in given]
    if kind in COMPARISON_OPS or (kind == "cast" and op.outputs[0].dtype in (types.fp16, types.fp32, types.bool)):
        return max(read, key=lambda each: max(map(abs, each)))
    if kind in _DATA_MOVEMENT_OPS:
        return min(low for low, _ in read), max(high for _, high in read)
    return _RANGE_ARITHMETIC[kind](op, read) if kind in _RANGE_ARITHMETIC else f"a {kind} in it"


def _list_vars(bound: Var | tuple[Var, ...] | list[Var] | None) -> list[Var]:
    return [] if bound is None else list(bound) if isinstance(bound, (list, tuple)) else [bound]


def _read_const_range(var: Var) -> IntegerRange:
    held = np.asarray(var.val) if is_const(var) else np.zeros(1)
    return (int(held.min()), int(held.max())) if held.size else (0, 0)
