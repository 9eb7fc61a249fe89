"""Scaling of sums of products: a power of two on one factor keeps the sums small."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_const
from ..convolution._conv_1d_lifting import rebuild_op

__all__ = ["build_scaled_op", "is_exactly_scalable"]

_FACTOR_INPUTS = {
    "conv": ("x", "weight"),
    "conv_transpose": ("x", "weight"),
    "linear": ("x", "weight"),
    "matmul": ("x", "y"),
}
Array = np.ndarray[Any, Any]


def is_exactly_scalable(var: Var | None, exponent: int) -> bool:
    """Return whether const `var` times 2**-exponent is exact in its own dtype, so that no small number loses bits."""
    if var is None:
        return True
    if not is_const(var):
        return False
    array = np.asarray(var.val)
    return bool(np.array_equal(_divide_by_power(array, exponent) * array.dtype.type(2**exponent), array))


def build_scaled_op(mb: RewriteBuilder, op: Operation, exponent: int) -> Var:
    """Rebuild `op` with its sums 2**exponent times smaller, and multiply the result back afterwards.

    The constant factor is scaled where that keeps every bit and `op` is its only reader; another reader would need the
    old constant beside the new one. Otherwise x is scaled by a mul before the op.
    """
    names = _FACTOR_INPUTS[op.op_type]
    changed: dict[str, Any] = {}
    constant = next((name for name in names if _is_only_reader(op, op.inputs[name])
                     and is_exactly_scalable(op.inputs[name], exponent)), None)
    if constant is not None:
        changed[constant] = _scale_down_const(mb, op.inputs[constant], exponent)
    else:
        changed["x"] = mb.mul(x=op.inputs["x"], y=_make_power_of_two(op.inputs["x"], -exponent))
    bias = op.inputs.get("bias")
    late = bias is not None and not is_exactly_scalable(bias, exponent)
    if bias is not None:
        changed["bias"] = None if late else _scale_down_const(mb, bias, exponent)
    total: Var = mb.mul(x=rebuild_op(mb, op, **changed), y=_make_power_of_two(op.outputs[0], exponent))
    return mb.add(x=total, y=mb.reshaped(bias, _compute_bias_shape(op))) if late else total


def _is_only_reader(op: Operation, var: Var) -> bool:
    others = (reader for reader in var.child_ops if reader is not op and reader.enclosing_block is not None)
    return next(others, None) is None and not var.consuming_blocks


def _scale_down_const(mb: RewriteBuilder, var: Var, exponent: int) -> Var:
    return mb.weight(var, f"over_{2**exponent}", lambda: _divide_by_power(np.asarray(var.val), exponent))


def _divide_by_power(array: Array, exponent: int) -> Array:
    made: Array = (array * array.dtype.type(2.0**-exponent)).astype(array.dtype)
    return made


def _make_power_of_two(var: Var, exponent: int) -> np.generic:
    kind = types.nptype_from_builtin(var.dtype)
    made: np.generic = kind(2.0**exponent)
    return made


def _compute_bias_shape(op: Operation) -> tuple[int, ...]:
    """Return the shape in which a bias is added to the output: one number a channel."""
    if op.op_type == "linear":
        return (int(op.bias.shape[0]),)
    return (1, int(op.bias.shape[0]), *[1] * (op.x.rank - 2))
