"""Convert constants, fills, ranges and random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import LayerContext, cast, read_indices, register_layer


@register_layer("loadConstant")
def convert_load_constant(params: Any, context: LayerContext) -> Var:
    """Convert a constant of shape [C, H, W]."""
    shape = tuple(int(each) for each in params.shape)
    return _make_constant(params.data, shape, (1, *shape) if context.classic else shape, context)


@register_layer("loadConstantND")
def convert_load_constant_nd(params: Any, context: LayerContext) -> Var:
    """Convert a constant of any shape."""
    shape = tuple(int(each) for each in params.shape)
    return _make_constant(params.data, shape, shape, context)


def _make_constant(data: Any, stored: tuple[int, ...], shape: tuple[int, ...], context: LayerContext) -> Var:
    found = context.weights.make(data, stored, "data")
    if isinstance(found, Var):
        result: Var = found if stored == shape else mb.reshape(x=found, shape=list(shape))
        return result
    return mb.const(val=found.reshape(shape))


def _get_shape(var: Var, context: LayerContext) -> Any:
    """Return the shape that is the value of `var`: an array, or a var of int32. InputError where it is too large."""
    found = read_indices(var, context)
    if not isinstance(found, Var):
        context.check_size(found)
    return found


def _read_sizes(sizes: Any, context: LayerContext) -> list[int]:
    """Return the sizes that a layer states. Raises InputError where they are too many elements."""
    found = [int(each) for each in sizes]
    context.check_size(found)
    return found


@register_layer("getShape")
def convert_get_shape(params: Any, context: LayerContext) -> Var:
    """Convert the shape of a value, in floats."""
    return cast(mb.shape(x=context.x), "fp32")


@register_layer("fillLike")
def convert_fill_like(params: Any, context: LayerContext) -> Var:
    return mb.fill(shape=mb.shape(x=context.x), value=np.float32(params.value))


@register_layer("fillStatic")
def convert_fill_static(params: Any, context: LayerContext) -> Var:
    return mb.fill(shape=_read_sizes(params.targetShape, context), value=np.float32(params.value))


@register_layer("fillDynamic")
def convert_fill_dynamic(params: Any, context: LayerContext) -> Var:
    return mb.fill(shape=_get_shape(context.x, context), value=np.float32(params.value))


@register_layer("rangeStatic")
def convert_range_static(params: Any, context: LayerContext) -> Var:
    """Convert a range of constants to a constant."""
    context.check_size([max(math.ceil((params.endValue - params.startValue) / params.stepSizeValue), 0)])
    numbers = np.arange(params.startValue, params.endValue, params.stepSizeValue, dtype=np.float64)
    return mb.const(val=numbers.astype(np.float32))


@register_layer("rangeDynamic")
def convert_range_dynamic(params: Any, context: LayerContext) -> Var:
    """Convert a range whose end, and possibly start and step, are computed."""
    inputs = [mb.reshape(x=each, shape=[1]) for each in context.inputs()]
    inputs = [mb.squeeze(x=each, axes=[0]) for each in inputs]
    start: Any = inputs[1] if len(inputs) > 1 else np.float32(params.startValue)
    step: Any = inputs[2] if len(inputs) > 2 else np.float32(params.stepSizeValue)
    return mb.range_1d(start=start, end=inputs[0], step=step)


def _find_random_shape(params: Any, context: LayerContext) -> Any:
    kind = context.layer.WhichOneof("layer")
    if kind.endswith("Static"):
        return _read_sizes(params.outputShape, context)
    return mb.shape(x=context.x) if kind.endswith("Like") else _get_shape(context.x, context)


@register_layer("randomNormalLike", "randomNormalStatic", "randomNormalDynamic")
def convert_random_normal(params: Any, context: LayerContext) -> Var:
    """Convert normal random numbers. The generator differs: the distribution is the same, the numbers are not."""
    return mb.random_normal(shape=_find_random_shape(params, context), mean=float(params.mean),
                            stddev=float(params.stdDev), seed=_get_seed(params))


@register_layer("randomUniformLike", "randomUniformStatic", "randomUniformDynamic")
def convert_random_uniform(params: Any, context: LayerContext) -> Var:
    """Convert uniform random numbers. The generator differs: the distribution is the same, the numbers are not."""
    return mb.random_uniform(shape=_find_random_shape(params, context), low=float(params.minVal),
                             high=float(params.maxVal), seed=_get_seed(params))


@register_layer("randomBernoulliLike", "randomBernoulliStatic", "randomBernoulliDynamic")
def convert_random_bernoulli(params: Any, context: LayerContext) -> Var:
    """Convert random zeros and ones. The generator differs: the distribution is the same, the numbers are not."""
    return mb.random_bernoulli(shape=_find_random_shape(params, context), prob=float(params.prob),
                               seed=_get_seed(params))


@register_layer("categoricalDistribution")
def convert_categorical(params: Any, context: LayerContext) -> Var:
    """Convert draws of classes, from probabilities or from logits with a temperature."""
    x: Var = context.x
    if params.isLogits and params.temperature not in (0.0, 1.0):
        x = mb.mul(x=x, y=np.float32(1 / params.temperature))
    drawn = mb.random_categorical(x=x, mode="logits" if params.isLogits else "probs", size=int(params.numSamples) or 1,
                                  seed=_get_seed(params))
    return cast(drawn, "fp32")


def _get_seed(params: Any) -> int:
    return int(params.seed)
