"""What the result of an op has to be, as what its operands have to be: intervals, one op type at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

__all__ = ["ANYTHING", "STEPS", "Asked", "Interval", "Wanted", "known", "meet"]

Interval = tuple[float, float]
"Lowest and highest value, both allowed."
ANYTHING: Interval = (-math.inf, math.inf)

Wanted = list[Interval]
"One interval for all elements of a value, or one for each element of a vector."
Asked = Iterable[tuple[Any, Sequence[Interval]]]
"Operands, and what is asked of each."


def meet(intervals: Iterable[Interval]) -> Interval:
    """What lies in all of them."""
    low, high = ANYTHING
    for one in intervals:
        low, high = max(low, one[0]), min(high, one[1])
    return low, high


def known(var: Any) -> Any:
    """The value of a constant parameter, None for one that is computed or left out."""
    return var.val if isinstance(var, Var) else None


def _range(var: Var) -> Interval | None:
    """Smallest and largest element of a constant number, None for anything else."""
    value = known(var)
    if value is None or not np.size(value) or np.asarray(value).dtype.kind not in "iuf":
        return None
    return float(np.min(value)), float(np.max(value))


def _same(name: str = "x") -> Callable[[Operation, Wanted], Asked]:
    """The values of an operand, in another type, shape or order."""

    def asked(op: Operation, wanted: Wanted) -> Asked:
        var, made = op.inputs[name], op.outputs[0]
        kept = len(wanted) == 1 or (var.rank <= 1 and made.rank <= 1 and tuple(var.shape) == tuple(made.shape))
        yield var, wanted if kept else [meet(wanted)]

    return asked


def _joined(op: Operation, wanted: Wanted) -> Asked:
    """A concat or stack; in a vector every operand gets what is wanted of its part."""
    counts = [1 if var.rank == 0 or op.op_type == "stack" else var.shape[0] for var in op.values]
    split = len(wanted) > 1 and not any(map(is_symbolic, counts)) and sum(counts) == len(wanted)
    start = 0
    for var, count in zip(op.values, counts):
        yield var, wanted[start:start + count] if split else [meet(wanted)]
        start += count if split else 0


def _arithmetic(back: Callable[[Interval, Interval, bool], Interval]) -> Callable[[Operation, Wanted], Asked]:
    """An op of x and y, one of them constant: `back(wanted, constant, x is the constant)` is what the other may be."""

    def asked(op: Operation, wanted: Wanted) -> Asked:
        for var, other in ((op.x, op.y), (op.y, op.x)):
            constant = _range(other)
            if constant is not None and _range(var) is None:
                each = wanted if var.rank <= 1 and len(wanted) > 1 and np.size(known(other)) == 1 else [meet(wanted)]
                yield var, [back(one, constant, other is op.x) for one in each]
        if _range(op.x) is None and _range(op.y) is None and op.op_type in ("add", "mul"):
            part = (lambda end: end / 2) if op.op_type == "add" else (lambda end: math.sqrt(max(end, 0)))
            for var in (op.x, op.y):  # each its part
                yield var, [tuple(map(part, meet(wanted)))]

    return asked


def _add(wanted: Interval, constant: Interval, _: bool) -> Interval:
    return wanted[0] - constant[0], wanted[1] - constant[1]


def _sub(wanted: Interval, constant: Interval, constant_first: bool) -> Interval:
    if constant_first:
        return constant[1] - wanted[1], constant[0] - wanted[0]
    return wanted[0] + constant[1], wanted[1] + constant[0]


def _mul(wanted: Interval, constant: Interval, _: bool) -> Interval:
    return ANYTHING if constant[0] <= 0 else (wanted[0] / constant[0], wanted[1] / constant[1])


def _floor_div(wanted: Interval, constant: Interval, constant_first: bool) -> Interval:
    if constant_first or constant[0] <= 0:
        return ANYTHING
    return wanted[0] * constant[1], (wanted[1] + 1) * constant[0] - 1


def _mod(wanted: Interval, constant: Interval, constant_first: bool) -> Interval:
    fits = not constant_first and wanted[0] <= 0 < constant[0] and constant[1] - 1 <= wanted[1]
    return ANYTHING if fits else wanted


def _maximum(wanted: Interval, constant: Interval, _: bool) -> Interval:
    return (-math.inf if constant[0] >= wanted[0] else wanted[0]), wanted[1]


def _minimum(wanted: Interval, constant: Interval, _: bool) -> Interval:
    return wanted[0], (math.inf if constant[1] <= wanted[1] else wanted[1])


def _clip(op: Operation, wanted: Wanted) -> Asked:
    low, high = _range(op.alpha), _range(op.beta)
    if low is not None and high is not None:
        yield op.x, [_minimum(_maximum(each, low, False), high, False) for each in wanted]


def _select(op: Operation, wanted: Wanted) -> Asked:
    """Both branches; what the condition itself makes sure of need not be asked for."""
    for var, taken in ((op.a, True), (op.b, False)):
        low, high = meet(wanted)
        sure = _sure_of(var, op.cond, taken)
        if sure == ANYTHING:
            yield var, wanted
        else:
            yield var, [(-math.inf if sure[0] >= low else low, math.inf if sure[1] <= high else high)]


def _sure_of(var: Var, cond: Var, taken: bool) -> Interval:
    """What `cond`, a comparison of v with a constant, says of `var` where it is `taken`; `var` is v or v + constant."""
    test = cond.op
    limits = None if test is None or test.op_type not in _TRUE_RANGE else _range(test.y)
    if test is None or limits is None:
        return ANYTHING
    low, high = _TRUE_RANGE[test.op_type](limits[0]) if taken else _FALSE_RANGE[test.op_type](limits[0])
    if var is test.x:
        return low, high
    if var.op is None or var.op.op_type != "add":
        return ANYTHING
    for mine, other in ((var.op.x, var.op.y), (var.op.y, var.op.x)):
        shift = _range(other)
        if mine is test.x and shift is not None:
            return low + shift[0], high + shift[1]
    return ANYTHING


_TRUE_RANGE: dict[str, Callable[[float], Interval]] = {
    "greater_equal": lambda c: (c, math.inf), "greater": lambda c: (c + 1, math.inf),
    "less": lambda c: (-math.inf, c - 1), "less_equal": lambda c: (-math.inf, c),
}
_FALSE_RANGE = {name: _TRUE_RANGE[other] for name, other in (
    ("greater_equal", "less"), ("greater", "less_equal"), ("less", "greater_equal"), ("less_equal", "greater"))}

STEPS: dict[str, Callable[[Operation, Wanted], Asked]] = {
    **dict.fromkeys(("cast", "identity", "expand_dims", "squeeze", "reshape", "transpose", "slice_by_index",
                     "slice_by_size", "tile", "gather", "gather_along_axis", "gather_nd", "reverse", "reduce_max",
                     "reduce_min", "pad", "slice_update"), _same()),
    "concat": _joined, "stack": _joined, "select": _select, "clip": _clip,
    "add": _arithmetic(_add), "sub": _arithmetic(_sub), "mul": _arithmetic(_mul), "floor_div": _arithmetic(_floor_div),
    "mod": _arithmetic(_mod), "maximum": _arithmetic(_maximum), "minimum": _arithmetic(_minimum),
}
"Ops that hand numbers on: what their operands may be when the result has to be in the wanted intervals."
