"""What the program itself says about how large values can be: plain intervals, over the few ops that bound anything."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from .query import is_const, is_opaque, is_symbolic, value
from .ranges import Range

__all__ = ["Interval", "interval_of", "largest", "seen"]

Interval = tuple[float, float]
_DEPTH = 6
"How many ops an interval is followed back through: a bounded cost for each question."
_FIXED: dict[str, Interval] = {
    "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "sigmoid_hard": (0.0, 1.0), "tanh": (-1.0, 1.0), "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0), "erf": (-1.0, 1.0), "softsign": (-1.0, 1.0), "sign": (-1.0, 1.0), "relu6": (0.0, 6.0),
    "atan": (-1.6, 1.6),
}
_SAME = frozenset({
    "expand_dims", "squeeze", "reshape", "transpose", "slice_by_index", "slice_by_size", "split", "tile", "identity",
    "reverse", "reduce_max", "reduce_min", "reduce_mean", "max_pool", "gather", "pixel_shuffle", "pixel_unshuffle",
    "cast", "upsample_nearest_neighbor", "sliding_windows",
})
"Ops whose every result is one of the elements of x, or between them."


def largest(var: Var) -> float | None:
    """A bound of the magnitudes of `var`'s elements that holds for every input; None when the program gives none."""
    interval = interval_of(var)
    return None if interval is None else max(abs(interval[0]), abs(interval[1]))


def seen(measured: Any, var: Var) -> Range | None:
    """What was measured for `var`, if anything was."""
    return None if measured is None else measured.get(var)


def interval_of(var: Var, depth: int = _DEPTH) -> Interval | None:
    """An interval that holds every element of `var` (but a NaN), or None."""
    if is_const(var):
        return _of_const(var)
    op = var.op
    if op is None or is_opaque(op) or not depth:
        return None
    if op.op_type in _FIXED:
        return _FIXED[op.op_type]
    if op.op_type in _SAME:
        return (0.0, 1.0) if op.x.dtype == types.bool else interval_of(op.x, depth - 1)
    rule = _RULES.get(op.op_type)
    return None if rule is None else rule(op, depth - 1)


def _of_const(var: Var) -> Interval | None:
    if types.is_list(var.sym_type) or not (types.is_float(var.dtype) or types.is_int(var.dtype)):
        return None
    value = np.asarray(var.val)
    if not value.size or value.size > 1 << 16 or not np.all(np.isfinite(value)):
        return None
    return float(value.min()), float(value.max())


def _hull(*intervals: Interval | None) -> Interval | None:
    known = [each for each in intervals if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(intervals) else None


def _clip(op: Operation, depth: int) -> Interval | None:
    return float(op.alpha.val), float(op.beta.val)


def _relu(op: Operation, depth: int) -> Interval | None:
    x = interval_of(op.x, depth)
    return None if x is None else (max(x[0], 0.0), max(x[1], 0.0))


def _abs(op: Operation, depth: int) -> Interval | None:
    x = interval_of(op.x, depth)
    return None if x is None else (0.0, max(abs(x[0]), abs(x[1])))


def _square(op: Operation, depth: int) -> Interval | None:
    x = _abs(op, depth)
    return None if x is None else (0.0, x[1] ** 2)


def _toward_zero(op: Operation, depth: int) -> Interval | None:
    """Bound `silu` and `gelu`: x times a share between 0 and 1, and never below -0.3."""
    x = interval_of(op.x, depth)
    return None if x is None else (max(min(x[0], 0.0), -0.3), max(x[1], 0.0))


def _normalized(op: Operation, depth: int) -> Interval | None:
    """Bound the result of `layer_norm` and `instance_norm`: no deviation passes the root of n times their own scale."""
    shape = op.x.shape
    axes = range(2, len(shape)) if op.op_type == "instance_norm" else value(op.axes) or range(len(shape))
    extents = [shape[axis] for axis in axes]
    if any(map(is_symbolic, extents)):
        return None
    given = (op.inputs.get("gamma"), op.inputs.get("beta"))
    scales = [default if var is None else largest(var) for var, default in zip(given, (1.0, 0.0))]
    if None in scales:
        return None
    scale, shift = (each for each in scales if each is not None)
    reach = math.sqrt(math.prod(extents)) * scale + shift
    return -reach, reach


def _unit(op: Operation, depth: int) -> Interval | None:
    return -1.0, 1.0


def _padded(op: Operation, depth: int) -> Interval | None:
    x = interval_of(op.x, depth)
    if str(value(op.mode, "constant")) != "constant":
        return x
    filled = 0.0 if op.inputs.get("constant_val") is None else _scalar(op.constant_val)
    return None if filled is None else _hull(x, (filled, filled))


def _whole(op: Operation, depth: int) -> Interval | None:
    x = interval_of(op.x, depth)
    return None if x is None else (float(np.floor(x[0])), float(np.ceil(x[1])))


def _sides(op: Operation, depth: int) -> tuple[Interval | None, Interval | None]:
    return interval_of(op.x, depth), interval_of(op.y, depth)


def _add(op: Operation, depth: int) -> Interval | None:
    x, y = _sides(op, depth)
    return None if x is None or y is None else (x[0] + y[0], x[1] + y[1])


def _sub(op: Operation, depth: int) -> Interval | None:
    remainder = _remainder(op)
    if remainder is not None:
        return remainder
    x, y = _sides(op, depth)
    return None if x is None or y is None else (x[0] - y[1], x[1] - y[0])


def _mul(op: Operation, depth: int) -> Interval | None:
    x, y = _sides(op, depth)
    if x is None or y is None:
        return None
    ends = [one * other for one in x for other in y]
    return min(ends), max(ends)


def _div(op: Operation, depth: int) -> Interval | None:
    x, y = _sides(op, depth)
    if x is None or y is None or y[0] <= 0.0 <= y[1]:
        return None
    ends = [one / other for one in x for other in y]
    return min(ends), max(ends)


def _minimum(op: Operation, depth: int) -> Interval | None:
    x, y = _sides(op, depth)
    return None if x is None or y is None else (min(x[0], y[0]), min(x[1], y[1]))


def _maximum(op: Operation, depth: int) -> Interval | None:
    x, y = _sides(op, depth)
    return None if x is None or y is None else (max(x[0], y[0]), max(x[1], y[1]))


def _mod(op: Operation, depth: int) -> Interval | None:
    """The remainder has the sign of the divisor."""
    y = interval_of(op.y, depth)
    return None if y is None or y[0] <= 0.0 <= y[1] else (min(y[0], 0.0), max(y[1], 0.0))


def _concat(op: Operation, depth: int) -> Interval | None:
    return _hull(*(interval_of(var, depth) for var in op.values))


def _select(op: Operation, depth: int) -> Interval | None:
    return _hull(interval_of(op.a, depth), interval_of(op.b, depth))


def _remainder(op: Operation) -> Interval | None:
    """`x - c * round(x / c)`, and with floor: the range reduction written out; None when `op` is none."""
    product = op.y.op
    if product is None or product.op_type != "mul":
        return None
    for count, step in ((product.x, product.y), (product.y, product.x)):
        c = _scalar(step)
        if c and count.op is not None and _counts(count.op, op.x, c):
            return (-abs(c), abs(c))  # half of it for round; x / c is rounded, too
    return None


def _counts(op: Operation, x: Var, c: float) -> bool:
    """Whether `op` gives how many times `c` goes into `x`."""
    if op.op_type == "floor_div":
        return op.x is x and _scalar(op.y) == c
    return op.op_type in ("round", "floor") and _divides(op.x, x, c)


def _divides(quotient: Var, x: Var, c: float) -> bool:
    op = quotient.op
    if op is None or op.op_type not in ("mul", "real_div"):
        return False
    factor, other = (_scalar(op.y), op.x) if _scalar(op.y) else (_scalar(op.x), op.y)
    if not factor or other is not x or (op.op_type == "real_div" and op.x is not x):
        return False
    product = factor * c if op.op_type == "mul" else c / factor
    return abs(product - 1.0) < 0.01


def _scalar(var: Var) -> float | None:
    return float(np.asarray(var.val).reshape(-1)[0]) if is_const(var) and np.size(var.val) == 1 else None


_RULES = {
    "clip": _clip, "relu": _relu, "abs": _abs, "round": _whole, "floor": _whole, "ceil": _whole, "add": _add,
    "sub": _sub, "mul": _mul, "real_div": _div, "minimum": _minimum, "maximum": _maximum, "mod": _mod,
    "concat": _concat, "stack": _concat, "select": _select, "square": _square, "silu": _toward_zero,
    "gelu": _toward_zero, "layer_norm": _normalized, "instance_norm": _normalized, "l2_norm": _unit, "pad": _padded,
}
