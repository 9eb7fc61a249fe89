"""Backward interval propagation: from the required interval of an op's result to those of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

__all__ = [
    "ANY_VALUE",
    "INVERSE_RULES",
    "Interval",
    "OperandRequirements",
    "RequiredIntervals",
    "get_constant_value",
    "intersect_intervals",
]

Interval = tuple[float, float]
"Lowest and highest value, both included."
ANY_VALUE: Interval = (-math.inf, math.inf)

RequiredIntervals = list[Interval]
"One interval for all elements of a value, or one for each element of a vector."
OperandRequirements = Iterable[tuple[Any, Sequence[Interval]]]
"Operands, with the required intervals of each."


def intersect_intervals(intervals: Iterable[Interval]) -> Interval:
    """Return the intersection of all intervals."""
    low, high = ANY_VALUE
    for one in intervals:
        low, high = max(low, one[0]), min(high, one[1])
    return low, high


def get_constant_value(var: Any) -> Any:
    """Return the value of a constant parameter; None if it is computed or omitted."""
    return var.val if isinstance(var, Var) else None


def _get_constant_range(var: Var) -> Interval | None:
    """Return the smallest and largest element of a numeric constant; None for other values."""
    value = get_constant_value(var)
    if value is None or not np.size(value) or np.asarray(value).dtype.kind not in "iuf":
        return None
    return float(np.min(value)), float(np.max(value))


def _pass_through(name: str = "x") -> Callable[[Operation, RequiredIntervals], OperandRequirements]:
    """Make the rule for an op that returns its operand's values in another dtype, shape or order."""

    def propagate_interval(op: Operation, required: RequiredIntervals) -> OperandRequirements:
        var, made = op.inputs[name], op.outputs[0]
        kept = len(required) == 1 or (var.rank <= 1 and made.rank <= 1 and tuple(var.shape) == tuple(made.shape))
        yield var, required if kept else [intersect_intervals(required)]

    return propagate_interval


def _split_requirement(op: Operation, required: RequiredIntervals) -> OperandRequirements:
    """Propagate through a concat or stack; for a vector, every operand gets the requirements of its part."""
    counts = [1 if var.rank == 0 or op.op_type == "stack" else var.shape[0] for var in op.values]
    split = len(required) > 1 and not any(map(is_symbolic, counts)) and sum(counts) == len(required)
    start = 0
    for var, count in zip(op.values, counts):
        yield var, required[start:start + count] if split else [intersect_intervals(required)]
        start += count if split else 0


def _invert_arithmetic(
    back: Callable[[Interval, Interval, bool], Interval],
) -> Callable[[Operation, RequiredIntervals], OperandRequirements]:
    """Make the rule for an op of x and y, one of which is constant.

    `back(wanted, constant, x is the constant)` returns the interval of the other operand.
    """

    def propagate_interval(op: Operation, required: RequiredIntervals) -> OperandRequirements:
        for var, other in ((op.x, op.y), (op.y, op.x)):
            constant = _get_constant_range(other)
            if constant is not None and _get_constant_range(var) is None:
                each = (
                    required
                    if var.rank <= 1 and len(required) > 1 and np.size(get_constant_value(other)) == 1
                    else [intersect_intervals(required)]
                )
                yield var, [back(one, constant, other is op.x) for one in each]
        if _get_constant_range(op.x) is None and _get_constant_range(op.y) is None and op.op_type in ("add", "mul"):
            part = (lambda end: end / 2) if op.op_type == "add" else (lambda end: math.sqrt(max(end, 0)))
            for var in (op.x, op.y):  # half of the sum, or the root of the product, for each operand
                yield var, [tuple(map(part, intersect_intervals(required)))]

    return propagate_interval


def _invert_add(required: Interval, constant: Interval, _: bool) -> Interval:
    return required[0] - constant[0], required[1] - constant[1]


def _invert_sub(required: Interval, constant: Interval, constant_first: bool) -> Interval:
    if constant_first:
        return constant[1] - required[1], constant[0] - required[0]
    return required[0] + constant[1], required[1] + constant[0]


def _invert_mul(required: Interval, constant: Interval, _: bool) -> Interval:
    return ANY_VALUE if constant[0] <= 0 else (required[0] / constant[0], required[1] / constant[1])


def _invert_floor_div(required: Interval, constant: Interval, constant_first: bool) -> Interval:
    if constant_first or constant[0] <= 0:
        return ANY_VALUE
    return required[0] * constant[1], (required[1] + 1) * constant[0] - 1


def _invert_mod(required: Interval, constant: Interval, constant_first: bool) -> Interval:
    fits = not constant_first and required[0] <= 0 < constant[0] and constant[1] - 1 <= required[1]
    return ANY_VALUE if fits else required


def _invert_maximum(required: Interval, constant: Interval, _: bool) -> Interval:
    return (-math.inf if constant[0] >= required[0] else required[0]), required[1]


def _invert_minimum(required: Interval, constant: Interval, _: bool) -> Interval:
    return required[0], (math.inf if constant[1] <= required[1] else required[1])


def _invert_clip(op: Operation, required: RequiredIntervals) -> OperandRequirements:
    low, high = _get_constant_range(op.alpha), _get_constant_range(op.beta)
    if low is not None and high is not None:
        yield op.x, [_invert_minimum(_invert_maximum(each, low, False), high, False) for each in required]


def _invert_select(op: Operation, required: RequiredIntervals) -> OperandRequirements:
    """Propagate to both branches, or, where both are what the condition tests plus a constant, to what it tests.

    An index that may count from the end is such a one, `select(i < 0, i + size, i)`. Where the values that both
    branches admit are apart, as for the first of several rows, the larger ones are required. Of one branch alone, the
    bounds that the condition itself guarantees are not required.
    """
    test, limits = op.cond.op, None
    if test is not None and test.op_type in _TRUE_RANGE:
        limits = _get_constant_range(test.y)
    low, high = intersect_intervals(required)
    admitted, single = [], []
    for var, ranges in ((op.a, _TRUE_RANGE), (op.b, _FALSE_RANGE)):
        shift = None if limits is None else _get_constant_distance(var, test.x)
        if limits is None or shift is None:
            single.append((var, required))
            continue
        first, last = ranges[test.op_type](limits[0])
        admitted.append(intersect_intervals([(first, last), (low - shift, high - shift)]))
        single.append((var, [(-math.inf if first + shift >= low else low, math.inf if last + shift <= high else high)]))
    if len(admitted) < 2:
        yield from single
        return
    parts = sorted((first, last) for first, last in admitted if first <= last)
    if len(parts) == 2 and parts[0][1] + 1 >= parts[1][0]:
        yield test.x, [(parts[0][0], parts[1][1])]
    elif parts:
        yield test.x, [parts[-1]]


def _get_constant_distance(var: Var, start: Var) -> float | None:
    """Return by what constant `var` is larger than `start`; None where it is something else."""
    if var is start:
        return 0.0
    if var.op is None or var.op.op_type != "add":
        return None
    for mine, other in ((var.op.x, var.op.y), (var.op.y, var.op.x)):
        constant = _get_constant_range(other)
        if mine is start and constant is not None and constant[0] == constant[1]:
            return constant[0]
    return None


_TRUE_RANGE: dict[str, Callable[[float], Interval]] = {
    "greater_equal": lambda c: (c, math.inf), "greater": lambda c: (c + 1, math.inf),
    "less": lambda c: (-math.inf, c - 1), "less_equal": lambda c: (-math.inf, c),
}
_FALSE_RANGE = {name: _TRUE_RANGE[other] for name, other in (
    ("greater_equal", "less"), ("greater", "less_equal"), ("less", "greater_equal"), ("less_equal", "greater"))}

INVERSE_RULES: dict[str, Callable[[Operation, RequiredIntervals], OperandRequirements]] = {
    **dict.fromkeys(
        (
            "cast",
            "identity",
            "expand_dims",
            "squeeze",
            "reshape",
            "transpose",
            "slice_by_index",
            "slice_by_size",
            "tile",
            "gather",
            "gather_along_axis",
            "gather_nd",
            "reverse",
            "reduce_max",
            "reduce_min",
            "pad",
            "slice_update",
        ),
        _pass_through(),
    ),
    "concat": _split_requirement,
    "stack": _split_requirement,
    "select": _invert_select,
    "clip": _invert_clip,
    "add": _invert_arithmetic(_invert_add),
    "sub": _invert_arithmetic(_invert_sub),
    "mul": _invert_arithmetic(_invert_mul),
    "floor_div": _invert_arithmetic(_invert_floor_div),
    "mod": _invert_arithmetic(_invert_mod),
    "maximum": _invert_arithmetic(_invert_maximum),
    "minimum": _invert_arithmetic(_invert_minimum),
}
"Rules by op type that propagate the intervals required of a result to the operands."
