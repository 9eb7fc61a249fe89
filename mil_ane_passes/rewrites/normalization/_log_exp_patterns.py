"""Patterns of logarithms of exponentials, and bounds of a value from the op that computes it."""

from __future__ import annotations

import math

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.query import get_const_value, is_const, is_opaque
from ...passes.contract import Miss

SOFTPLUS_SAFE_LIMIT = 10.0
"Largest input for which softplus is reported correct on every chip."
_NEGLIGIBLE_EPSILON = 2.0**-126
"Largest epsilon of `log` that only avoids the logarithm of zero: the smallest normal number of fp32."
_MIN_SOFTPLUS_THRESHOLD = 8.0
"Value from which tanh(x) and tanh(softplus(x)) differ by less than 2e-10."
_UPPER_BOUNDS = {
    "relu6": 6.0,
    **dict.fromkeys(("sigmoid", "softmax", "tanh", "softsign", "erf", "sin", "cos", "sigmoid_hard", "sign"), 1.0),
}
"Largest result of ops, whatever they read."
_MAX_MAXIMUM_DEPTH = 4
"Most ops between a maximum and where it is subtracted: it may be clipped to finite numbers and reshaped."
_NON_NEGATIVE_OPS = ("abs", "relu", "relu6", "square", "exp", "exp2", "sqrt", "sigmoid", "softmax", "softplus")


def is_made_by(var: Var, *op_types: str) -> bool:
    """Return whether an op of one of these types computes `var`."""
    return var.op is not None and var.op.op_type in op_types and not is_opaque(var.op)


def find_precision_obstacle(op: Operation) -> str | None:
    """Return why a defect of fp16 does not affect `op`, or None where its output is fp16."""
    dtype = op.outputs[0].dtype
    return None if dtype == types.fp16 else f"computed in {types.builtin_to_string(dtype)}; the fault is in fp16 only"


def find_softplus_miss(op: Operation, x: Var) -> Miss | None:
    """Return why softplus(x), or what `op` computes of it, is right in spite of its cliff in fp16; else None."""
    reason = find_precision_obstacle(op)
    if reason:
        return Miss(op, reason)
    bound = find_upper_bound(x)
    if bound > SOFTPLUS_SAFE_LIMIT:
        return None
    return Miss(op, f"x never exceeds {bound:g}, and softplus is correct up to {SOFTPLUS_SAFE_LIMIT:g}", near=False)


def _read_uniform_value(var: Var) -> float | None:
    """Return the number that every element of const `var` has, or None."""
    if not is_const(var) or not types.is_float(var.dtype) or np.size(var.val) == 0:
        return None
    first = np.ravel(var.val)[0]
    return float(first) if np.all(np.asarray(var.val) == first) else None


def has_negligible_epsilon(log: Operation) -> bool:
    """Return whether the epsilon of `log` is too small to be a part of the function that is meant."""
    epsilon = get_const_value(log.epsilon)
    return epsilon is not None and 0 <= epsilon <= _NEGLIGIBLE_EPSILON


def find_exp_operand(var: Var) -> Var | None:
    """Return x where `var` is exp(x), else None."""
    return var.op.x if is_made_by(var, "exp") else None


def find_log1p_exp_operand(log: Operation) -> Var | None:
    """Return x of log(1 + exp(x)), with the 1 added by an op or as the epsilon, as `log1p` is converted; else None."""
    if get_const_value(log.epsilon) == 1:
        return find_exp_operand(log.x)
    if not has_negligible_epsilon(log) or not is_made_by(log.x, "add"):
        return None
    add = log.x.op
    for power, other in ((add.x, add.y), (add.y, add.x)):
        x = find_exp_operand(power)
        if x is not None and _read_uniform_value(other) == 1 and tuple(power.shape) == tuple(add.outputs[0].shape):
            return x
    return None


def find_softplus_operand(var: Var) -> Var | None:
    """Return x of softplus(x) as an op, as log(1 + exp(x)), or as either with x itself above a threshold; else None."""
    x: Var | None = None
    if is_made_by(var, "softplus"):
        x = var.op.x
    elif is_made_by(var, "log"):
        x = find_log1p_exp_operand(var.op)
    elif is_made_by(var, "select") and is_made_by(var.op.b, "softplus", "log") and is_made_by(var.op.cond, "greater"):
        select, comparison = var.op, var.op.cond.op
        threshold = _read_uniform_value(comparison.y)
        same = select.a is comparison.x and select.a is find_softplus_operand(select.b)
        if same and threshold is not None and threshold >= _MIN_SOFTPLUS_THRESHOLD:
            x = select.a
    return x


def find_upper_bound(var: Var) -> float:
    """Return an upper bound of `var`, inferred from its op alone; infinity where that gives no bound."""
    op = var.op
    if op is None or is_opaque(op):
        return math.inf
    if is_const(var):
        return float(np.max(var.val)) if types.is_float(var.dtype) and np.size(var.val) else math.inf
    if op.op_type in _UPPER_BOUNDS:
        return _UPPER_BOUNDS[op.op_type]
    if op.op_type == "clip":
        return float(get_const_value(op.beta, math.inf))
    if op.op_type == "minimum":
        return min(_find_const_upper_bound(op.x), _find_const_upper_bound(op.y))
    if op.op_type == "mul" and any(
        is_made_by(operand, *_NON_NEGATIVE_OPS) and _find_const_upper_bound(other) <= 0
        for operand, other in ((op.x, op.y), (op.y, op.x))
    ):
        return 0.0
    return 0.0 if op.op_type == "sub" and is_maximum_subtracted(op) else math.inf


def _find_const_upper_bound(var: Var) -> float:
    return find_upper_bound(var) if is_const(var) else math.inf


def is_maximum_subtracted(sub: Operation, axes: tuple[int, ...] | None = None) -> bool:
    """Return whether `sub` subtracts from x its maximum (over `axes`, unless None), or max(a, b) from min(a, b)."""
    maximum = sub.y
    for _ in range(_MAX_MAXIMUM_DEPTH):
        if is_made_by(maximum, "clip", "squeeze", "expand_dims", "identity"):
            maximum = maximum.op.x
        elif is_made_by(maximum, "select"):
            maximum = maximum.op.a if is_const(maximum.op.b) else maximum.op.b
    if is_made_by(maximum, "maximum") and is_made_by(sub.x, "minimum"):
        return {maximum.op.x, maximum.op.y} == {sub.x.op.x, sub.x.op.y}
    if not is_made_by(maximum, "reduce_max") or maximum.op.x is not sub.x:
        return False
    return axes is None or axes == read_reduced_axes(maximum.op)


def read_reduced_axes(reduction: Operation) -> tuple[int, ...] | None:
    """Return the reduced axes counted from the front, sorted; None when they are dynamic."""
    rank = reduction.x.rank
    if reduction.axes is None:
        return tuple(range(rank))
    axes = get_const_value(reduction.axes)
    return None if not axes else tuple(sorted({int(axis) % rank for axis in axes}))
