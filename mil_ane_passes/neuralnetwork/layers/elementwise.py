"""Convert layers of two or more values: sums, products, comparisons, logic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..layer_converter import LayerContext, cast, register_layer


def _combine_inputs(context: LayerContext, op: Callable[..., Any]) -> Var:
    """Apply the op of two operands to all inputs, in sequence."""
    inputs = context.inputs()
    if not inputs:
        raise context.refuse("no inputs", "expected at least one: use a fresh copy of the model")
    return functools.reduce(lambda x, y: op(x=x, y=y), inputs)


def _add_values(x: Var, y: Var) -> Var:
    """Add two values; one less the other where a layer negates it, as the format has no difference of values."""
    for one, other in ((y, x), (x, y)):
        negated = _find_negated(one)
        if negated is not None:
            result: Var = mb.sub(x=other, y=negated)
            return result
    result = mb.add(x=x, y=y)
    return result


def _find_negated(x: Var) -> Var | None:
    """Return the value whose negation `x` is; None where it is not one."""
    if x.op is None or x.op.op_type != "mul" or x.val is not None:
        return None
    for one, other in ((x.op.x, x.op.y), (x.op.y, x.op.x)):
        if other.val is not None and np.ndim(other.val) == 0 and other.val == -1:
            return one
    return None


@register_layer("add")
def convert_add(params: Any, context: LayerContext) -> Var:
    """Convert a sum of the inputs, or of one input and a constant."""
    if len(context.layer.input) == 1:
        return _add_values(context.x, mb.const(val=np.float32(params.alpha)))
    return _combine_inputs(context, _add_values)


@register_layer("multiply")
def convert_multiply(params: Any, context: LayerContext) -> Var:
    """Convert a product of the inputs, or of one input and a constant."""
    if len(context.layer.input) == 1:
        return mb.mul(x=context.x, y=np.float32(params.alpha))
    return _combine_inputs(context, mb.mul)


@register_layer("average")
def convert_average(params: Any, context: LayerContext) -> Var:
    """Convert the mean of the inputs."""
    return mb.mul(x=_combine_inputs(context, mb.add), y=np.float32(1 / len(context.layer.input)))


_OPS: dict[str, Callable[..., Any]] = {
    "max": mb.maximum, "min": mb.minimum, "addBroadcastable": _add_values, "multiplyBroadcastable": mb.mul,
    "maxBroadcastable": mb.maximum, "minBroadcastable": mb.minimum, "subtractBroadcastable": mb.sub,
    "divideBroadcastable": mb.real_div, "powBroadcastable": mb.pow, "modBroadcastable": mb.mod,
}


@register_layer(*_OPS)
def convert_operation(params: Any, context: LayerContext) -> Var:
    """Convert an op that MIL has, with broadcasting."""
    return _combine_inputs(context, _OPS[context.layer.WhichOneof("layer")])


@register_layer("floorDivBroadcastable")
def convert_floor_div(params: Any, context: LayerContext) -> Var:
    """Convert floor(x / y) of floats."""
    return mb.floor(x=_combine_inputs(context, mb.real_div))


@register_layer("dot")
def convert_dot(params: Any, context: LayerContext) -> Var:
    """Convert a dot product of two values, over channels or the last axis; optionally of normalized ones."""
    x, y = context.inputs()
    axes = [-3, -2, -1] if x.rank > 2 else [-1]
    product: Var = mb.reduce_sum(x=mb.mul(x=x, y=y), axes=axes, keep_dims=True)
    if not params.cosineSimilarity:
        return product
    norms = mb.mul(x=mb.reduce_l2_norm(x=x, axes=axes, keep_dims=True),
                   y=mb.reduce_l2_norm(x=y, axes=axes, keep_dims=True))
    return mb.real_div(x=product, y=norms)


@register_layer("scale")
def convert_scale(params: Any, context: LayerContext) -> Var:
    """Convert a product with a constant of shape [1], [C], [1, H, W] or [C, H, W], and a sum with another."""
    scale = context.weights.read(params.scale, _get_shape(params.shapeScale), "scale")
    result: Var = mb.mul(x=context.x, y=_align_constant(scale))
    if params.hasBias:
        bias = context.weights.read(params.bias, _get_shape(params.shapeBias), "bias")
        result = mb.add(x=result, y=_align_constant(bias))
    return result


@register_layer("bias")
def convert_bias(params: Any, context: LayerContext) -> Var:
    """Convert a sum with a constant of shape [1], [C], [1, H, W] or [C, H, W]."""
    return mb.add(x=context.x, y=_align_constant(context.weights.read(params.bias, _get_shape(params.shape), "bias")))


def _get_shape(stored: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in stored) or (1,)


def _align_constant(constant: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a constant of one axis, which is that of the channels, in a shape that broadcasts over [C, H, W]."""
    if constant.size == 1:
        return constant.reshape(())
    return constant.reshape(-1, 1, 1) if constant.ndim == 1 else constant


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "equal": mb.equal, "notEqual": mb.not_equal, "lessThan": mb.less, "lessEqual": mb.less_equal,
    "greaterThan": mb.greater, "greaterEqual": mb.greater_equal,
}


@register_layer(*_COMPARISONS)
def convert_comparison(params: Any, context: LayerContext) -> Var:
    """Convert a comparison, with 1 for true and 0 for false."""
    inputs = context.inputs()
    y: Any = inputs[1] if len(inputs) > 1 else np.float32(params.alpha)
    return cast(_COMPARISONS[context.layer.WhichOneof("layer")](x=inputs[0], y=y), "fp32")


_LOGIC: dict[str, Callable[..., Any]] = {
    "logicalOr": mb.logical_or, "logicalAnd": mb.logical_and, "logicalXor": mb.logical_xor,
}


@register_layer(*_LOGIC)
def convert_logic(params: Any, context: LayerContext) -> Var:
    """Convert logic on numbers, of which every one besides 0 is true."""
    x, y = (to_bool(each) for each in context.inputs())
    return cast(_LOGIC[context.layer.WhichOneof("layer")](x=x, y=y), "fp32")


def to_bool(x: Var) -> Var:
    """Return whether elements are not 0; the bools of which `x` was made, where it is a cast of some."""
    if x.op is not None and x.op.op_type == "cast" and types.is_bool(x.op.x.dtype):
        return x.op.x
    result: Var = mb.not_equal(x=x, y=np.float32(0))
    return result


@register_layer("whereBroadcastable")
def convert_where(params: Any, context: LayerContext) -> Var:
    """Convert a selection by a mask: the second input where the first is not 0, else the third."""
    mask, x, y = context.inputs()
    return mb.select(cond=to_bool(mask), a=x, b=y)
