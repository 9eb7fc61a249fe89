"""Convert poolings."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import LayerContext, register_layer
from .padding import read_border_amounts


@register_layer("pooling")
def convert_pooling(params: Any, context: LayerContext) -> Var:
    """Convert a 2-D pooling: of maxima, means or root sums of squares; padding may take in the last partial window."""
    x, restore = context.to_nchw(context.x)
    kind = params.PoolingType.Name(params.type)
    if params.globalPooling:
        if kind == "MAX":
            return restore(mb.reduce_max(x=x, axes=[2, 3], keep_dims=True))
        if kind == "AVERAGE":
            return restore(mb.reduce_mean(x=x, axes=[2, 3], keep_dims=True))
        return restore(mb.reduce_l2_norm(x=x, axes=[2, 3], keep_dims=True))
    kernel, strides = context.read_positive("kernelSize", (3, 3)), context.read_positive("stride", (1, 1))
    form = params.WhichOneof("PoolingPaddingType") or "valid"
    settings: dict[str, Any] = {"kernel_sizes": kernel, "strides": strides, "pad_type": "valid"}
    if form == "same":
        lower = params.same.asymmetryMode == params.same.TOP_LEFT_HEAVY
        settings["pad_type"] = "same_lower" if lower else "same"
    elif form == "includeLastPixel":
        return restore(_pool_with_last_pixel(x, params, kind, kernel, strides, context))
    else:
        pads = read_border_amounts(params.valid.paddingAmounts, context)
        if any(pads):
            settings |= {"pad_type": "custom", "pad": pads}
    return restore(_build_pool(x, kind, settings, bool(params.avgPoolExcludePadding)))


def _build_pool(x: Var, kind: str, settings: dict[str, Any], exclude: bool) -> Var:
    if kind == "MAX":
        result: Var = mb.max_pool(x=x, **settings)
    elif kind == "AVERAGE":
        result = mb.avg_pool(x=x, exclude_padding_from_average=exclude, **settings)
    else:
        result = mb.l2_pool(x=x, **settings)
    return result


def _pool_with_last_pixel(
    x: Var, params: Any, kind: str, kernel: list[int], strides: list[int], context: LayerContext
) -> Var:
    """Pool as Caffe does: symmetric pads, and the last window may be partial, unless it starts in the pad."""
    amounts = [int(each) for each in params.includeLastPixel.paddingAmounts] or [0, 0]
    sizes = x.shape[-2:]
    if any(not isinstance(each, (int, np.integer)) for each in sizes):
        raise context.refuse("padding of the form includeLastPixel on a flexible shape", "expected a fixed shape")
    pads = []
    for size, extent, stride, pad in zip(map(int, sizes), kernel, strides, amounts):
        count = -(-(size + 2 * pad - extent) // stride) + 1
        if (count - 1) * stride >= size + pad:
            count -= 1
        reach = (count - 1) * stride + extent
        pads += [pad, max(reach - size - pad, 0)]
    settings = {"kernel_sizes": kernel, "strides": strides, "pad_type": "custom", "pad": pads}
    if kind != "AVERAGE" or params.avgPoolExcludePadding:
        return _build_pool(x, kind, settings, True)
    # A mean counts the symmetric pads and not the elements beyond them.
    padded = mb.pad(x=x, pad=[0, 0, 0, 0, amounts[0], amounts[0], amounts[1], amounts[1]], mode="constant",
                    constant_val=0.0)
    rest = [0, pads[1] - amounts[0], 0, pads[3] - amounts[1]]
    if min(rest) < 0:
        return _build_pool(x, kind, settings, False)
    return _build_pool(padded, kind, settings | {"pad": rest}, True)


@register_layer("pooling3d")
def convert_pooling3d(params: Any, context: LayerContext) -> Var:
    """Convert a 3-D pooling of maxima or means; its input has rank 5."""
    kind = params.Pooling3DPaddingType.Name(params.paddingType).lower()
    settings: dict[str, Any] = {
        "kernel_sizes": [int(each) for each in (params.kernelDepth, params.kernelHeight, params.kernelWidth)],
        "strides": [int(each) or 1 for each in (params.strideDepth, params.strideHeight, params.strideWidth)],
        "pad_type": kind,
    }
    if kind == "custom":
        settings["pad"] = [int(each) for each in (
            params.customPaddingFront, params.customPaddingBack, params.customPaddingTop, params.customPaddingBottom,
            params.customPaddingLeft, params.customPaddingRight)]
    return _build_pool(context.x, params.PoolingType3D.Name(params.type), settings, bool(params.countExcludePadding))


@register_layer("globalPooling3d")
def convert_global_pooling3d(params: Any, context: LayerContext) -> Var:
    """Convert a pooling of all of depth, height and width."""
    reduce = mb.reduce_max if params.GlobalPoolingType3D.Name(params.type) == "MAX" else mb.reduce_mean
    return reduce(x=context.x, axes=[-3, -2, -1], keep_dims=True)
