"""Bounds on results: they exclude an overflow of an op at float32 that would not occur at float64.

NaN and infinities in the operands propagate in the same way at any precision. Overflow of finite elements is the only
additional source at float32. For the ops below, a bound on the finite elements of the operands excludes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.query import get_const_value, get_static_shape

__all__ = ["can_overflow"]

Magnitudes = Callable[[str], float]
"The largest finite magnitude of each operand, by input name; 0 for an input that the op does not have."

_FLOAT32_LIMIT = 2.0**126
"Half of the largest power of two in float32: a margin for sums, which are rounded at each step."
_DEFAULT_EPSILON = 1e-5

_SAFE_OPS = frozenset({
    # Results are elements of the operands.
    "abs", "batch_to_space", "cast", "clip", "concat", "depth_to_space", "expand_dims", "gather", "identity",
    "max_pool", "maximum", "minimum", "pixel_shuffle", "pixel_unshuffle", "reduce_max", "reduce_min", "relu", "relu6",
    "reshape", "reverse", "select", "slice_by_index", "slice_by_size", "sliding_windows", "space_to_batch",
    "space_to_depth", "split", "squeeze", "stack", "tile", "transpose", "upsample_nearest_neighbor",
    # Result magnitudes are at most 1, or at most those of an operand.
    "sigmoid", "softmax", "tanh", "silu",
})


def can_overflow(op: Any, magnitudes: Magnitudes) -> bool:
    """Return whether `op` may overflow at float32 on finite elements; True if no bound for the op is known."""
    if op.op_type in _SAFE_OPS:
        return False
    bound = _BOUNDS.get(op.op_type)
    return bound is None or not bound(op, magnitudes) < _FLOAT32_LIMIT


def _bound_products(op: Any, magnitudes: Magnitudes) -> float:
    """Bound a sum of products and the bias; it has at most as many products as the weight has elements."""
    shape = get_static_shape(op.weight)
    if shape is None:
        return math.inf
    return math.prod(shape) * magnitudes("x") * magnitudes("weight") + magnitudes("bias")


def _bound_matmul(op: Any, magnitudes: Magnitudes) -> float:
    """Bound a sum of products along the inner axis."""
    shape = get_static_shape(op.x)
    return math.inf if shape is None else max(shape[-2:], default=1) * magnitudes("x") * magnitudes("y")


def _bound_quotient(op: Any, magnitudes: Magnitudes) -> float:
    """Bound a quotient by a constant."""
    divisor = get_const_value(op.y)
    least = 0.0 if divisor is None else float(np.abs(np.asarray(divisor, np.float64)).min(initial=math.inf))
    return magnitudes("x") / least if least > 0 else math.inf


def _bound_layer_norm(op: Any, magnitudes: Magnitudes) -> float:
    """Bound the result, and the squares of the elements minus their mean."""
    epsilon = float(get_const_value(op.epsilon, _DEFAULT_EPSILON))
    if epsilon < 1 / _FLOAT32_LIMIT:
        return math.inf
    shape, centered = get_static_shape(op.x), 2 * magnitudes("x")
    squares = math.inf if shape is None else math.prod(shape) * centered**2
    return max(squares, centered / math.sqrt(epsilon) * max(1.0, magnitudes("gamma")) + magnitudes("beta"))


_BOUNDS: dict[str, Callable[[Any, Magnitudes], float]] = {
    "conv": _bound_products,
    "conv_transpose": _bound_products,
    "linear": _bound_products,
    "matmul": _bound_matmul,
    "real_div": _bound_quotient,
    "layer_norm": _bound_layer_norm,
    "add": lambda op, magnitudes: magnitudes("x") + magnitudes("y"),
    "sub": lambda op, magnitudes: magnitudes("x") + magnitudes("y"),
    "mul": lambda op, magnitudes: magnitudes("x") * magnitudes("y"),
    "square": lambda op, magnitudes: magnitudes("x") ** 2,
    "gelu": lambda op, magnitudes: max(1.0, magnitudes("x")) ** 3,
    "leaky_relu": lambda op, magnitudes: magnitudes("x") * max(1.0, magnitudes("alpha")),
}
