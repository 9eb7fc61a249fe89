"""Interval analysis: static bounds on the magnitudes of values, from the few op types whose results are bounded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from .query import get_const_value, is_const, is_opaque, is_symbolic
from .value_ranges import Range

__all__ = ["Interval", "bound_magnitude", "get_measured_range", "infer_interval"]

Interval = tuple[float, float]
_MAX_DEPTH = 6
"Longest chain of producers that is followed for an interval. It limits the cost of a query, as each step may branch."
_FIXED_INTERVALS: dict[str, Interval] = {
    "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "sigmoid_hard": (0.0, 1.0), "tanh": (-1.0, 1.0), "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0), "erf": (-1.0, 1.0), "softsign": (-1.0, 1.0), "sign": (-1.0, 1.0), "relu6": (0.0, 6.0),
    "atan": (-1.6, 1.6),
}
_RANGE_PRESERVING_OPS = frozenset({
    "expand_dims", "squeeze", "reshape", "transpose", "slice_by_index", "slice_by_size", "split", "tile", "identity",
    "reverse", "reduce_max", "reduce_min", "reduce_mean", "max_pool", "gather", "pixel_shuffle", "pixel_unshuffle",
    "cast", "upsample_nearest_neighbor", "sliding_windows",
})
"Ops whose result elements are elements of x, or lie between elements of x."


def bound_magnitude(var: Var) -> float | None:
    """Return a bound on the magnitudes of `var`'s elements that holds for every input; None if none can be inferred."""
    interval = infer_interval(var)
    return None if interval is None else max(abs(interval[0]), abs(interval[1]))


def get_measured_range(measured: Any, var: Var) -> Range | None:
    """Return the measured range of `var`, or None if it was not measured."""
    return None if measured is None else measured.get(var)


def infer_interval(var: Var, depth: int = _MAX_DEPTH) -> Interval | None:
    """Infer an interval that contains every element of `var` (except NaN); None if none can be inferred."""
    if is_const(var):
        return _compute_const_interval(var)
    op = var.op
    if op is None or is_opaque(op) or not depth:
        return None
    if op.op_type in _FIXED_INTERVALS:
        return _FIXED_INTERVALS[op.op_type]
    if op.op_type in _RANGE_PRESERVING_OPS:
        return (0.0, 1.0) if op.x.dtype == types.bool else infer_interval(op.x, depth - 1)
    rule = _BOUND_FUNCTIONS.get(op.op_type)
    return None if rule is None else rule(op, depth - 1)


def _compute_const_interval(var: Var) -> Interval | None:
    if types.is_list(var.sym_type) or not (types.is_float(var.dtype) or types.is_int(var.dtype)):
        return None
    value = np.asarray(var.val)
    if not value.size or value.size > 1 << 16 or not np.all(np.isfinite(value)):
        return None
    return float(value.min()), float(value.max())


def _join_intervals(*intervals: Interval | None) -> Interval | None:
    known = [each for each in intervals if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(intervals) else None


def _bound_clip(op: Operation, depth: int) -> Interval | None:
    return float(op.alpha.val), float(op.beta.val)


def _bound_relu(op: Operation, depth: int) -> Interval | None:
    x = infer_interval(op.x, depth)
    return None if x is None else (max(x[0], 0.0), max(x[1], 0.0))


def _bound_abs(op: Operation, depth: int) -> Interval | None:
    x = infer_interval(op.x, depth)
    return None if x is None else (0.0, max(abs(x[0]), abs(x[1])))


def _bound_square(op: Operation, depth: int) -> Interval | None:
    x = _bound_abs(op, depth)
    return None if x is None else (0.0, x[1] ** 2)


def _bound_silu_or_gelu(op: Operation, depth: int) -> Interval | None:
    """Bound `silu` and `gelu`: x times a factor between 0 and 1, never below -0.3."""
    x = infer_interval(op.x, depth)
    return None if x is None else (max(min(x[0], 0.0), -0.3), max(x[1], 0.0))


def _bound_norm(op: Operation, depth: int) -> Interval | None:
    """Bound the result of `layer_norm` and `instance_norm`.

    If n elements are normalized together, a normalized element is at most sqrt(n) in magnitude. Gamma scales this bound
    and beta shifts it.
    """
    shape = op.x.shape
    axes = range(2, len(shape)) if op.op_type == "instance_norm" else get_const_value(op.axes) or range(len(shape))
    extents = [shape[axis] for axis in axes]
    if any(map(is_symbolic, extents)):
        return None
    inputs = (op.inputs.get("gamma"), op.inputs.get("beta"))
    scales = [default if var is None else bound_magnitude(var) for var, default in zip(inputs, (1.0, 0.0))]
    if None in scales:
        return None
    scale, shift = (each for each in scales if each is not None)
    reach = math.sqrt(math.prod(extents)) * scale + shift
    return -reach, reach


def _bound_l2_norm(op: Operation, depth: int) -> Interval | None:
    return -1.0, 1.0


def _bound_pad(op: Operation, depth: int) -> Interval | None:
    x = infer_interval(op.x, depth)
    if str(get_const_value(op.mode, "constant")) != "constant":
        return x
    filled = 0.0 if op.inputs.get("constant_val") is None else _read_scalar_const(op.constant_val)
    return None if filled is None else _join_intervals(x, (filled, filled))


def _bound_rounding(op: Operation, depth: int) -> Interval | None:
    x = infer_interval(op.x, depth)
    return None if x is None else (float(np.floor(x[0])), float(np.ceil(x[1])))


def _infer_operand_intervals(op: Operation, depth: int) -> tuple[Interval | None, Interval | None]:
    return infer_interval(op.x, depth), infer_interval(op.y, depth)


def _bound_add(op: Operation, depth: int) -> Interval | None:
    x, y = _infer_operand_intervals(op, depth)
    return None if x is None or y is None else (x[0] + y[0], x[1] + y[1])


def _bound_sub(op: Operation, depth: int) -> Interval | None:
    remainder = _bound_remainder(op)
    if remainder is not None:
        return remainder
    x, y = _infer_operand_intervals(op, depth)
    return None if x is None or y is None else (x[0] - y[1], x[1] - y[0])


def _bound_mul(op: Operation, depth: int) -> Interval | None:
    x, y = _infer_operand_intervals(op, depth)
    if x is None or y is None:
        return None
    ends = [one * other for one in x for other in y]
    return min(ends), max(ends)


def _bound_real_div(op: Operation, depth: int) -> Interval | None:
    x, y = _infer_operand_intervals(op, depth)
    if x is None or y is None or y[0] <= 0.0 <= y[1]:
        return None
    ends = [one / other for one in x for other in y]
    return min(ends), max(ends)


def _bound_minimum(op: Operation, depth: int) -> Interval | None:
    x, y = _infer_operand_intervals(op, depth)
    return None if x is None or y is None else (min(x[0], y[0]), min(x[1], y[1]))


def _bound_maximum(op: Operation, depth: int) -> Interval | None:
    x, y = _infer_operand_intervals(op, depth)
    return None if x is None or y is None else (max(x[0], y[0]), max(x[1], y[1]))


def _bound_mod(op: Operation, depth: int) -> Interval | None:
    """Bound `mod`: the remainder has the sign of the divisor."""
    y = infer_interval(op.y, depth)
    return None if y is None or y[0] <= 0.0 <= y[1] else (min(y[0], 0.0), max(y[1], 0.0))


def _bound_concat(op: Operation, depth: int) -> Interval | None:
    return _join_intervals(*(infer_interval(var, depth) for var in op.values))


def _bound_select(op: Operation, depth: int) -> Interval | None:
    return _join_intervals(infer_interval(op.a, depth), infer_interval(op.b, depth))


def _bound_remainder(op: Operation) -> Interval | None:
    """Bound the result of `x - c * round(x / c)`, the explicit form of range reduction (also with floor).

    Returns None when `op` does not match.
    """
    product = op.y.op
    if product is not None and product.op_type in ("round", "floor") and product.x is op.x:
        return (-1.0, 1.0)
    if product is None or product.op_type != "mul":
        return None
    for count, step in ((product.x, product.y), (product.y, product.x)):
        c = _read_scalar_const(step)
        if c and count.op is not None and _is_rounded_quotient(count.op, op.x, c):
            return (-abs(c), abs(c))  # with exact division, `round` would give c / 2; but x / c is rounded, too
    return None


def _is_rounded_quotient(op: Operation, x: Var, c: float) -> bool:
    """Return whether `op` computes x / c, rounded to an integer."""
    if op.op_type == "floor_div":
        return op.x is x and _read_scalar_const(op.y) == c
    return op.op_type in ("round", "floor") and _is_quotient(op.x, x, c)


def _is_quotient(quotient: Var, x: Var, c: float) -> bool:
    op = quotient.op
    if op is None or op.op_type not in ("mul", "real_div"):
        return False
    factor, other = _read_scalar_const(op.y), op.x
    if not factor and op.op_type == "mul":
        factor, other = _read_scalar_const(op.x), op.y
    if other.op is not None and other.op.op_type == "floor" and c >= 1 and c.is_integer():
        other = other.op.x  # floor(floor(x) / c) is floor(x / c)
    if not factor or other is not x:
        return False
    product = factor * c if op.op_type == "mul" else c / factor
    return abs(product - 1.0) < 0.01


def _read_scalar_const(var: Var) -> float | None:
    return float(np.asarray(var.val).reshape(-1)[0]) if is_const(var) and np.size(var.val) == 1 else None


_BOUND_FUNCTIONS = {
    "clip": _bound_clip,
    "relu": _bound_relu,
    "abs": _bound_abs,
    "round": _bound_rounding,
    "floor": _bound_rounding,
    "ceil": _bound_rounding,
    "add": _bound_add,
    "sub": _bound_sub,
    "mul": _bound_mul,
    "real_div": _bound_real_div,
    "minimum": _bound_minimum,
    "maximum": _bound_maximum,
    "mod": _bound_mod,
    "concat": _bound_concat,
    "stack": _bound_concat,
    "select": _bound_select,
    "square": _bound_square,
    "silu": _bound_silu_or_gelu,
    "gelu": _bound_silu_or_gelu,
    "layer_norm": _bound_norm,
    "instance_norm": _bound_norm,
    "l2_norm": _bound_l2_norm,
    "pad": _bound_pad,
}
