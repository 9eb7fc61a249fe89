"""Patterns of logarithms of exponentials, and bounds of a value from the op that computes it."""

from __future__ import annotations

import math

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_opaque

__all__ = [
    "FP16_MAX",
    "SOFTPLUS_SAFE_LIMIT",
    "build_stable_softplus",
    "find_exp_operand",
    "find_log1p_exp_operand",
    "find_precision_obstacle",
    "find_softplus_operand",
    "find_upper_bound",
    "has_negligible_epsilon",
    "is_made_by",
    "is_maximum_subtracted",
    "match_log_sum_exp",
    "read_reduced_axes",
    "read_uniform_value",
]

FP16_MAX = np.float16(65504)
"The largest finite number of fp16."
SOFTPLUS_SAFE_LIMIT = 10.0
"Largest input for which softplus is reported correct on every chip."
_NEGLIGIBLE_EPSILON = 2.0**-126
"Largest epsilon of `log` that only avoids the logarithm of zero: the smallest normal number of fp32."
_MIN_SOFTPLUS_THRESHOLD = 8.0
"Value from which tanh(x) and tanh(softplus(x)) differ by less than 2e-10."
_UPPER_BOUNDS = {"relu6": 6.0, "sigmoid": 1.0, "softmax": 1.0, "tanh": 1.0, "softsign": 1.0, "erf": 1.0, "sin": 1.0,
                 "cos": 1.0, "sigmoid_hard": 1.0, "sign": 1.0}
_NON_NEGATIVE_OPS = ("abs", "relu", "relu6", "square", "exp", "exp2", "sqrt", "sigmoid", "softmax", "softplus")


def is_made_by(var: Var, *op_types: str) -> bool:
    """Return whether an op of one of these types computes `var`."""
    return var.op is not None and var.op.op_type in op_types and not is_opaque(var.op)


def find_precision_obstacle(op: Operation) -> str | None:
    """Return why a defect of fp16 does not affect `op`, or None where its output is fp16."""
    dtype = op.outputs[0].dtype
    return None if dtype == types.fp16 else f"computed in {types.builtin_to_string(dtype)}, and the fault is fp16's"


def read_uniform_value(var: Var) -> float | None:
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
    for power, one in ((add.x, add.y), (add.y, add.x)):
        x = find_exp_operand(power)
        if x is not None and read_uniform_value(one) == 1 and tuple(power.shape) == tuple(add.outputs[0].shape):
            return x
    return None


def find_softplus_operand(var: Var) -> Var | None:
    """Return x of softplus(x) as an op, as log(1 + exp(x)), or as either with x itself above a threshold; else None."""
    if is_made_by(var, "softplus"):
        x: Var = var.op.x
        return x
    if is_made_by(var, "log"):
        return find_log1p_exp_operand(var.op)
    if is_made_by(var, "select") and is_made_by(var.op.b, "softplus", "log") and is_made_by(var.op.cond, "greater"):
        select, test = var.op, var.op.cond.op
        threshold = read_uniform_value(test.y)
        same = select.a is test.x and select.a is find_softplus_operand(select.b)
        if same and threshold is not None and threshold >= _MIN_SOFTPLUS_THRESHOLD:
            x = select.a
            return x
    return None


def match_log_sum_exp(op: Operation) -> tuple[Var, Operation] | None:
    """Return (x, the op that sums its exponentials) where `op` computes the logarithm of their sum, else None."""
    if op.op_type == "reduce_log_sum_exp":
        return (op.x, op) if op.x.rank else None
    total = op if op.op_type == "reduce_log_sum" else op.x.op if is_made_by(op.x, "reduce_sum", "cumsum") else None
    x = None if total is None else find_exp_operand(total.x)
    return (x, total) if x is not None and x.rank else None


def build_stable_softplus(mb: RewriteBuilder, x: Var) -> Var:
    """Build relu(x) + softplus(-|x|), which is softplus(x): the input of the op is never above 0."""
    size = mb.mul(x=mb.abs(x=x), y=np.float16(-1))
    soft: Var = mb.add(x=mb.relu(x=x), y=mb.softplus(x=size))
    return soft


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
    if op.op_type == "mul":
        pairs = ((op.x, op.y), (op.y, op.x))
        return (
            0.0
            if any(is_made_by(a, *_NON_NEGATIVE_OPS) and _find_const_upper_bound(b) <= 0 for a, b in pairs)
            else math.inf
        )
    if op.op_type == "sub":
        return 0.0 if is_maximum_subtracted(op) else math.inf
    return math.inf


def _find_const_upper_bound(var: Var) -> float:
    return find_upper_bound(var) if is_const(var) else math.inf


def is_maximum_subtracted(sub: Operation, axes: tuple[int, ...] | None = None) -> bool:
    """Return whether `sub` subtracts from x its maximum (over `axes`, unless None), or max(a, b) from min(a, b)."""
    top = sub.y
    for _ in range(4):  # a maximum may be clipped to finite numbers and reshaped before it is subtracted
        if is_made_by(top, "clip", "squeeze", "expand_dims", "identity"):
            top = top.op.x
        elif is_made_by(top, "select"):
            top = top.op.a if is_const(top.op.b) else top.op.b
    if is_made_by(top, "maximum") and is_made_by(sub.x, "minimum"):
        return {top.op.x, top.op.y} == {sub.x.op.x, sub.x.op.y}
    return is_made_by(top, "reduce_max") and top.op.x is sub.x and (axes is None or axes == read_reduced_axes(top.op))


def read_reduced_axes(reduction: Operation) -> tuple[int, ...] | None:
    """Return the reduced axes counted from the front, sorted; None when they are dynamic."""
    rank = reduction.x.rank
    if reduction.axes is None:
        return tuple(range(rank))
    axes = get_const_value(reduction.axes)
    return None if not axes else tuple(sorted({int(axis) % rank for axis in axes}))
