"""Activations. `alpha` and `beta` are scalars, or one value per channel for `prelu` and `softplus_parametric`.

Each kernel holds at most two tensors of the size of `x` besides `x`: intermediate results are changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..numeric import canonicalize_layout, make_scalar
from ..registry import register_kernel

__all__ = ["apply_softmax", "get_recurrent_activation"]


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def compute_softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute `log(1 + e^x)` without overflow."""
    return torch.abs(x).neg_().exp_().log1p_().add_(torch.relu(x))


def _multiply_into(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Overwrite `y` with `x * y`, in this order: of two NaNs a product keeps the first."""
    return torch.mul(x, y, out=y)


def apply_softmax(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Compute softmax along `axis`. The axis is moved last first, so that its position does not change the rounding."""
    if x.dim() == 0:
        return torch.ones_like(x)
    return torch.softmax(canonicalize_layout(x.movedim(axis, -1)), dim=-1).movedim(-1, axis)


_PLAIN_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": relu,
    "relu6": lambda x: torch.clamp(x, 0.0, 6.0),
    "softplus": compute_softplus,
    "softsign": lambda x: x / torch.abs(x).add_(1.0),
}

#: the activations that a recurrent op may name, with the constants that coremltools' own op tests expect
_RECURRENT_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hard_sigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0.0, 1.0),
    "linear": lambda x: x,
    "relu": relu,
    "scaled_tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sigmoid_hard": lambda x: torch.clamp(0.2 * x + 0.5, 0.0, 1.0),
    "tanh": torch.tanh,
}


def get_recurrent_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation that a recurrent op names."""
    return _RECURRENT_ACTIVATIONS[name.lower()]


@register_kernel(*_PLAIN_ACTIVATIONS)
def evaluate_plain_activation(op: Any, ins: Any) -> torch.Tensor:
    return _PLAIN_ACTIVATIONS[op.op_type](ins["x"])


@register_kernel("sigmoid", "silu")
def evaluate_sigmoid(op: Any, ins: Any) -> torch.Tensor:
    """Evaluate `sigmoid(x)`, or `x * sigmoid(x)`.

    torch.sigmoid rounds the last elements of an array differently from the others, because they do not fill a vector
    register. It is used for its speed at float32 only, at which no bits are compared.
    """
    x = ins["x"]
    y = torch.sigmoid(x) if ins.machine.precision.name == "float32" else x.neg().exp_().add_(1.0).reciprocal_()
    return y if op.op_type == "sigmoid" else _multiply_into(x, y)


@register_kernel("softmax")
def softmax(op: Any, ins: Any) -> torch.Tensor:
    return apply_softmax(ins["x"], ins.value("axis"))


@register_kernel("clamped_relu")
def clamped_relu(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    y = _select_into(x >= 0, x, ins["alpha"] * x)
    return torch.minimum(y, ins["beta"], out=y)


@register_kernel("elu")
def elu(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    return _select_into(x > 0, x, torch.expm1(x).mul_(ins["alpha"]))


@register_kernel("gelu")
def gelu(op: Any, ins: Any) -> torch.Tensor:
    """Compute gelu step by step.

    In torch's own kernel, the rounding of an element depends on its position, and an infinity becomes NaN at some
    positions.
    """
    x, mode = ins["x"], ins.value("mode")
    if mode == "SIGMOID_APPROXIMATION":
        return _multiply_into(x, (x * make_scalar(1.702, x.dtype)).sigmoid_())
    if mode == "TANH_APPROXIMATION":
        cubic, scale = make_scalar(0.044715, x.dtype), make_scalar(math.sqrt(2.0 / math.pi), x.dtype)
        y = torch.pow(x, 3).mul_(cubic).add_(x).mul_(scale).tanh_()
    else:
        y = (x / make_scalar(math.sqrt(2.0), x.dtype)).erf_()
    return y.add_(make_scalar(1.0, x.dtype)).mul_(make_scalar(0.5, x.dtype)).mul_(x)


@register_kernel("leaky_relu")
def leaky_relu(op: Any, ins: Any) -> torch.Tensor:
    x, alpha = ins["x"], ins["alpha"]
    slope = float(alpha)
    if 0 <= slope < math.inf:  # gives the same bits in one pass over the memory
        return torch.nn.functional.leaky_relu(x, slope)
    y = alpha * x
    return torch.where(x < 0, y, x, out=y)


@register_kernel("linear_activation")
def linear_activation(op: Any, ins: Any) -> torch.Tensor:
    return (ins["alpha"] * ins["x"]).add_(ins["beta"])


@register_kernel("prelu")
def prelu(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    return _select_into(x > 0, x, _reshape_per_channel(ins["alpha"], x) * x)


@register_kernel("scaled_tanh")
def scaled_tanh(op: Any, ins: Any) -> torch.Tensor:
    return (ins["x"] * ins["beta"]).tanh_().mul_(ins["alpha"])


@register_kernel("sigmoid_hard")
def sigmoid_hard(op: Any, ins: Any) -> torch.Tensor:
    return (ins["alpha"] * ins["x"]).add_(ins["beta"]).clamp_(0.0, 1.0)


@register_kernel("softplus_parametric")
def softplus_parametric(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    return compute_softplus(x * _reshape_per_channel(ins["beta"], x)).mul_(_reshape_per_channel(ins["alpha"], x))


@register_kernel("thresholded_relu")
def thresholded_relu(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    return torch.where(x < ins["alpha"], 0.0, x)


def _select_into(where: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Overwrite `y` with `x` where `where` is true."""
    return torch.where(where, x, y, out=y)


def _reshape_per_channel(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return parameter.reshape(-1, *(1,) * (x.dim() - 2)) if parameter.dim() else parameter
