"""Convert gathers, scatters and masks by position."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var
from coremltools.proto import NeuralNetwork_pb2

from ..layer_converter import LayerContext, cast, register_layer


def _get_mode(params: Any) -> str:
    name: str = NeuralNetwork_pb2.ScatterMode.Name(params.mode)
    return name.removeprefix("SCATTER_").lower()


@register_layer("gather")
def convert_gather(params: Any, context: LayerContext) -> Var:
    """Convert a selection of slices on an axis by indices."""
    x, indices = context.inputs()
    return mb.gather(x=x, indices=context.to_int(indices), axis=int(params.axis))


@register_layer("gatherND")
def convert_gather_nd(params: Any, context: LayerContext) -> Var:
    """Convert a selection of elements or slices by index tuples."""
    x, indices = context.inputs()
    return mb.gather_nd(x=x, indices=context.to_int(indices))


@register_layer("gatherAlongAxis")
def convert_gather_along_axis(params: Any, context: LayerContext) -> Var:
    """Convert a selection of one element on an axis for each index."""
    x, indices = context.inputs()
    return mb.gather_along_axis(x=x, indices=context.to_int(indices), axis=int(params.axis))


@register_layer("scatter")
def convert_scatter(params: Any, context: LayerContext) -> Var:
    """Convert a write of slices on an axis at indices."""
    data, indices, updates = context.inputs()
    return mb.scatter(data=data, indices=context.to_int(indices), updates=updates, axis=int(params.axis),
                      mode=_get_mode(params))


@register_layer("scatterND")
def convert_scatter_nd(params: Any, context: LayerContext) -> Var:
    """Convert a write of elements or slices at index tuples."""
    data, indices, updates = context.inputs()
    return mb.scatter_nd(data=data, indices=context.to_int(indices), updates=updates, mode=_get_mode(params))


@register_layer("scatterAlongAxis")
def convert_scatter_along_axis(params: Any, context: LayerContext) -> Var:
    """Convert a write of one element on an axis for each index."""
    data, indices, updates = context.inputs()
    return mb.scatter_along_axis(data=data, indices=context.to_int(indices), updates=updates, axis=int(params.axis),
                                 mode=_get_mode(params))


@register_layer("oneHot")
def convert_one_hot(params: Any, context: LayerContext) -> Var:
    """Convert one-hot vectors of indices; their size may be a second input."""
    inputs = context.inputs()
    size: Any = int(params.oneHotVectorSize)
    if len(inputs) > 1:
        size = mb.squeeze(x=context.to_int(mb.reshape(x=inputs[1], shape=[1])), axes=[0])
    return mb.one_hot(indices=context.to_int(inputs[0]), one_hot_vector_size=size, axis=int(params.axis),
                      on_value=np.float32(params.onValue), off_value=np.float32(params.offValue))


@register_layer("whereNonZero")
def convert_where_non_zero(params: Any, context: LayerContext) -> Var:
    """Convert the indices of elements that are not 0."""
    return cast(mb.non_zero(x=context.x), "fp32")


@register_layer("matrixBandPart")
def convert_band_part(params: Any, context: LayerContext) -> Var:
    return mb.band_part(x=context.x, lower=int(params.numLower), upper=int(params.numUpper))


@register_layer("lowerTriangular")
def convert_lower(params: Any, context: LayerContext) -> Var:
    """Convert the part on and below diagonal k."""
    k, x = int(params.k), context.x
    if k >= 0:
        return mb.band_part(x=x, lower=-1, upper=k)
    return mb.sub(x=x, y=mb.band_part(x=x, lower=-k - 1, upper=-1))


@register_layer("upperTriangular")
def convert_upper(params: Any, context: LayerContext) -> Var:
    """Convert the part on and above diagonal k."""
    k, x = int(params.k), context.x
    if k <= 0:
        return mb.band_part(x=x, lower=-k, upper=-1)
    return mb.sub(x=x, y=mb.band_part(x=x, lower=-1, upper=k - 1))
