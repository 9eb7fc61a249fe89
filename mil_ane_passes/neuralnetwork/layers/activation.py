"""Convert activations and unary functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ...ir.inverse_hyperbolic import build_acosh, build_asinh
from ..layer_converter import MIN_EPSILON, LayerContext, cast, register_layer


@register_layer("activation")
def convert_activation(params: Any, context: LayerContext) -> Var:
    """Convert an activation function."""
    return apply_activation(params, context.x, context)


def apply_activation(params: Any, x: Var, context: LayerContext) -> Var:
    """Apply the function of ActivationParams to `x`."""
    kind = params.WhichOneof("NonlinearityType")
    if kind is None:
        raise context.refuse("an activation without a function", "expected one: use a fresh copy of the model")
    chosen = getattr(params, kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind](x=x)
    if kind == "linear":
        return _scale_and_shift(x, float(chosen.alpha), float(chosen.beta))
    if kind == "leakyReLU":
        return mb.leaky_relu(x=x, alpha=float(chosen.alpha))
    if kind == "thresholdedReLU":
        return mb.thresholded_relu(x=x, alpha=float(chosen.alpha))
    if kind == "scaledTanh":
        return mb.scaled_tanh(x=x, alpha=float(chosen.alpha), beta=float(chosen.beta))
    if kind == "sigmoidHard":
        return mb.sigmoid_hard(x=x, alpha=float(chosen.alpha), beta=float(chosen.beta))
    if kind == "ELU":
        return mb.elu(x=x, alpha=float(chosen.alpha))
    if kind == "PReLU":
        return _apply_prelu(chosen, x, context)
    return _apply_parametric_softplus(chosen, x, context)


_SIMPLE: dict[str, Callable[..., Any]] = {
    "ReLU": mb.relu, "tanh": mb.tanh, "sigmoid": mb.sigmoid, "softsign": mb.softsign, "softplus": mb.softplus,
}


def _scale_and_shift(x: Var, scale: float, shift: float) -> Var:
    result = x if scale == 1 else mb.mul(x=x, y=np.float32(scale))
    if shift:
        result = mb.add(x=result, y=np.float32(shift))
    return mb.identity(x=x) if result is x else result


def _read_per_channel(params: Any, x: Var, what: str, context: LayerContext) -> np.ndarray[Any, Any]:
    """Read one number for each channel, or one for all."""
    count = len(params.floatValue) or len(params.float16Value) // 2
    channels = x.shape[-3] if x.rank > 2 else x.shape[-1]
    numbers = context.weights.read(params, (count,), what)
    if count not in (1, channels):
        raise context.refuse(f"{count} numbers in its {what} for {channels} channels", "expected one for each, or one")
    return numbers


def _apply_prelu(params: Any, x: Var, context: LayerContext) -> Var:
    alpha = _read_per_channel(params.alpha, x, "alpha", context)
    if alpha.size == 1:
        return mb.leaky_relu(x=x, alpha=float(alpha[0]))
    four, restore = context.to_nchw(x)
    return restore(mb.prelu(x=four, alpha=alpha))


def _apply_parametric_softplus(params: Any, x: Var, context: LayerContext) -> Var:
    alpha = _read_per_channel(params.alpha, x, "alpha", context)
    beta = _read_per_channel(params.beta, x, "beta", context)
    four, restore = context.to_nchw(x)
    channels = int(four.shape[1])
    alpha, beta = (np.broadcast_to(each, (channels,)).copy() for each in (alpha, beta))
    return restore(mb.softplus_parametric(x=four, alpha=alpha, beta=beta))


@register_layer("clampedReLU")
def convert_clamped_relu(params: Any, context: LayerContext) -> Var:
    """Convert min(beta, x where x >= 0, alpha * x elsewhere)."""
    return mb.clamped_relu(x=context.x, alpha=float(params.alpha), beta=float(params.beta))


@register_layer("gelu")
def convert_gelu(params: Any, context: LayerContext) -> Var:
    """Convert a GELU, exact or approximated."""
    return mb.gelu(x=context.x, mode=params.GeluMode.Name(params.mode))


@register_layer("unary")
def convert_unary(params: Any, context: LayerContext) -> Var:
    """Convert a function of `scale * x + shift`; the format reads a scale of 0 as 1, and an epsilon of 0 as 1e-6."""
    kind = params.Operation.Name(params.type)
    x = _scale_and_shift(context.x, float(params.scale) or 1.0, float(params.shift))
    epsilon = max(float(params.epsilon) or 1e-6, MIN_EPSILON)
    if kind == "SQRT":
        return mb.sqrt(x=x)
    if kind == "RSQRT":
        return mb.rsqrt(x=x, epsilon=epsilon)
    if kind == "INVERSE":
        return mb.inverse(x=x, epsilon=epsilon)
    if kind == "POWER":
        return mb.pow(x=x, y=np.float32(params.alpha))
    if kind == "EXP":
        return mb.exp(x=x)
    if kind == "LOG":
        return mb.log(x=x, epsilon=epsilon)
    if kind == "ABS":
        return mb.abs(x=x)
    return mb.maximum(x=x, y=np.float32(params.alpha))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": mb.ceil, "floor": mb.floor, "sign": mb.sign, "round": mb.round, "exp2": mb.exp2, "sin": mb.sin,
    "cos": mb.cos, "tan": mb.tan, "asin": mb.asin, "acos": mb.acos, "atan": mb.atan, "sinh": mb.sinh, "cosh": mb.cosh,
    "tanh": mb.tanh, "atanh": mb.atanh, "erf": mb.erf,
}


@register_layer(*_FUNCTIONS)
def convert_function(params: Any, context: LayerContext) -> Var:
    """Convert a function that MIL has an op for, element by element."""
    return _FUNCTIONS[context.layer.WhichOneof("layer")](x=context.x)


@register_layer("asinh")
def convert_asinh(params: Any, context: LayerContext) -> Var:
    """Convert asinh, which MIL has no op for, to logarithms and a root that stay in the range of fp16."""
    return build_asinh(context.x)


@register_layer("acosh")
def convert_acosh(params: Any, context: LayerContext) -> Var:
    """Convert acosh to 2 * log(sqrt((x + 1) / 2) + sqrt((x - 1) / 2)), which MIL has no op for."""
    return build_acosh(context.x)


@register_layer("clip")
def convert_clip(params: Any, context: LayerContext) -> Var:
    """Convert a clip to a range."""
    return mb.clip(x=context.x, alpha=float(params.minVal), beta=float(params.maxVal))


@register_layer("logicalNot")
def convert_not(params: Any, context: LayerContext) -> Var:
    """Convert a negation: 1 where x is 0, else 0."""
    return cast(mb.equal(x=context.x, y=np.float32(0)), "fp32")
