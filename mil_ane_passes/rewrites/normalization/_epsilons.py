"""Epsilons of ops: the input that is one, and whether results depend on it."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.query import get_const_value, get_consumers, is_const
from ._norms import match_norm, read_positive_scalar

__all__ = ["find_epsilon", "find_epsilon_dependence"]

_NORM_OPS = ("layer_norm", "instance_norm", "l2_norm")
_DIVIDING_OPS = ("sqrt", "rsqrt", "pow", "inverse", "real_div", "tile")
_BINARY_STEPS, _UNARY_STEPS = ("add", "maximum", "mul", "real_div"), ("sqrt", "rsqrt", "pow", "inverse", "clip", "tile")
"Ops between a norm and the division by it: with a constant operand, and without."
_MAX_PRODUCT_DEPTH = 3
"Number of nested products that are searched for the squared value."
_MIN_EXPLICIT_EPSILON = 1e-40
"Smallest epsilon that counts as one: below it is coremltools' default of log, which means no epsilon."
_NEGLIGIBLE_EPSILON_RATIO = 2.0**10
"Ratio of a variance to an epsilon from which adding the epsilon moves it by half a unit of fp16 at most."


def find_epsilon(op: Operation) -> tuple[str, float | None]:
    """Return the input of `op` that is an epsilon, and its value; ("", None) where it has no epsilon."""
    if op.op_type in ("add", "maximum"):
        for parameter in ("y", "x"):
            found = read_positive_scalar(getattr(op, parameter))
            if found is not None:
                return parameter, found
        return "", None
    parameter = "alpha" if op.op_type == "clip" else "epsilon"
    var = getattr(op, parameter)
    if var is None or not is_const(var) or (op.op_type == "clip" and read_positive_scalar(var) is None):
        return "", None
    return parameter, float(get_const_value(var))


def find_epsilon_dependence(op: Operation, parameter: str, old: float, least: float) -> tuple[str, bool]:
    """Return (reason, near): why the epsilon `least` for `old` might change the result, and whether to report it.

    The reason is "" where the result stays the same.
    """
    if op.op_type in _NORM_OPS:
        return "", True
    if op.op_type == "batch_norm":
        return _find_batch_norm_dependence(op, old, least)
    source: Var = op.x if parameter != "x" else op.y
    if op.op_type in ("add", "maximum", "clip"):
        readers = get_consumers(op.outputs[0])
        if not readers or not all(_is_division_by(reader, op.outputs[0]) for reader in readers):
            return "nothing is divided by it", False
    elif source.op is not None and source.op.op_type in ("add", "maximum", "clip"):
        return "something is added to the operand already", False
    if op.op_type == "log" and old < _MIN_EXPLICIT_EPSILON:
        return "an epsilon that says there is none", False
    norm = None if op.op_type == "log" else match_norm(source, 2) or match_norm(source, 1)
    if norm is None:
        return f"at 0 the result of {op.op_type} is that of an epsilon of {old:.3g}", True
    if any(kind in ("add", "maximum") and given >= least for kind, given in norm.steps):
        return "beside the epsilon there is already this one does not count", False
    if op.op_type in ("rsqrt", "inverse") and not _is_only_multiplied(op.outputs[0]):
        return "the root is read by others than products, and at 0 it is the epsilon's", True
    if not _is_divisor_only(op.outputs[0], norm.x):
        return "what is divided is not what was squared: where that is 0, the result is the epsilon's", True
    return "", True


def _is_division_by(reader: Operation, var: Var) -> bool:
    return reader.op_type in _DIVIDING_OPS and (reader.op_type != "real_div" or reader.y is var)


def _is_only_multiplied(var: Var) -> bool:
    return not var.consuming_blocks and all(reader.op_type == "mul" for reader in get_consumers(var))


def _is_divisor_only(var: Var, x: Var) -> bool:
    """Return whether `var`, a power of the norm of `x`, is used only to divide multiples of `x`."""
    pending = [var]
    while pending:
        power = pending.pop()
        if power.consuming_blocks:
            return False
        for reader in get_consumers(power):
            other = (reader.y if reader.x is power else reader.x) if reader.op_type in _BINARY_STEPS else None
            over = reader.op_type == "real_div" and reader.y is power
            if (reader.op_type == "mul" or over) and _is_multiple_of(other, x):
                continue
            if reader.op_type == "pow":
                other = reader.y
            if reader.op_type not in _BINARY_STEPS + _UNARY_STEPS or not (other is None or is_const(other)):
                return False
            if reader.op_type == "pow" and np.max(np.abs(reader.y.val)) > 1:
                return False
            pending.append(reader.outputs[0])
    return True


def _is_multiple_of(var: Var | None, x: Var) -> bool:
    """Return whether `var` is `x` times some factor, so that it is 0 where `x` is."""
    pending = [(var, _MAX_PRODUCT_DEPTH)]
    while pending:
        one, depth = pending.pop()
        if one is x:
            return True
        if one is None or one.op is None or not depth:
            continue
        if one.op.op_type in ("mul", "real_div"):
            pending.append((one.op.x, depth - 1))
        if one.op.op_type == "mul":
            pending.append((one.op.y, depth - 1))
    return False


def _find_batch_norm_dependence(op: Operation, old: float, least: float) -> tuple[str, bool]:
    if op.variance.val is None:
        return "the variances are compressed", True
    variance = float(np.min(op.variance.val))
    if variance >= least * _NEGLIGIBLE_EPSILON_RATIO:
        return f"beside variances from {variance:.3g} an epsilon of {old:.3g} does not count", True
    return f"beside a variance of {variance:.3g} another epsilon than {old:.3g} gives another result", True
