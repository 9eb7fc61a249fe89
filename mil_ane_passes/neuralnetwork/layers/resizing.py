"""Convert upsamplings, resizes and crops with a resize."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import LayerContext, register_layer

_SAMPLING = {
    "STRICT_ALIGN_ENDPOINTS_MODE": "STRICT_ALIGN_CORNERS", "ALIGN_ENDPOINTS_MODE": "ALIGN_CORNERS",
    "UPSAMPLE_MODE": "DEFAULT", "ROI_ALIGN_MODE": "OFFSET_CORNERS",
}


@register_layer("upsample")
def convert_upsample(params: Any, context: LayerContext) -> Var:
    """Convert an upsampling by factors, to the nearest element or between elements."""
    x, restore = context.to_nchw(context.x)
    whole = [int(each) for each in params.scalingFactor] or [1, 1]
    factors: list[Any] = [float(each) for each in params.fractionalScalingFactor] or whole
    if params.InterpolationMode.Name(params.mode) == "NN":
        if any(each != int(each) for each in factors):
            return restore(mb.resize_nearest_neighbor(x=x, **_get_sizes(x, factors, context)))
        return restore(mb.upsample_nearest_neighbor(
            x=x, scale_factor_height=int(factors[0]), scale_factor_width=int(factors[1])))
    mode = params.LinearUpsampleMode.Name(params.linearUpsampleMode)
    if mode == "DEFAULT":
        sizes = _get_sizes(x, factors, context)
        return restore(mb.resize_bilinear(
            x=x, target_size_height=sizes["target_size_height"], target_size_width=sizes["target_size_width"],
            sampling_mode="DEFAULT"))
    settings = {"align_corners": mode == "ALIGN_CORNERS_TRUE"}
    return restore(mb.upsample_bilinear(
        x=x, scale_factor_height=factors[0], scale_factor_width=factors[1], **settings))


def _get_sizes(x: Var, factors: list[Any], context: LayerContext) -> dict[str, int]:
    sizes = x.shape[-2:]
    if any(not isinstance(each, (int, np.integer)) for each in sizes):
        raise context.refuse("this interpolation of a flexible shape", "expected a fixed shape")
    height, width = (int(np.floor(int(size) * factor)) for size, factor in zip(sizes, factors))
    return {"target_size_height": height, "target_size_width": width}


@register_layer("resizeBilinear")
def convert_resize(params: Any, context: LayerContext) -> Var:
    """Convert a resize to fixed sizes."""
    x, restore = context.to_nchw(context.x)
    height, width = (int(each) for each in (params.targetSize or (1, 1)))
    mode = _SAMPLING[params.mode.Method.Name(params.mode.samplingMethod)]
    return restore(mb.resize_bilinear(x=x, target_size_height=height, target_size_width=width, sampling_mode=mode))


@register_layer("cropResize")
def convert_crop_resize(params: Any, context: LayerContext) -> Var:
    """Convert crops of boxes that are resized to one size; the result has the boxes on its first axis."""
    x, boxes = context.inputs()
    image, _ = context.to_nchw(x)
    height, width = (int(each) for each in (params.targetSize or (1, 1)))
    count = boxes.shape[-3]
    if count not in (4, 5):
        raise context.refuse(f"boxes of {count} numbers", "expected 4, or 5 with the index of the image")
    settings = {
        "target_height": height, "target_width": width, "normalized_coordinates": bool(params.normalizedCoordinates),
        "box_coordinate_mode": params.boxIndicesMode.Coordinates.Name(params.boxIndicesMode.boxMode),
        "sampling_mode": _SAMPLING[params.mode.Method.Name(params.mode.samplingMethod)],
        "spatial_scale": np.float32(params.spatialScale or 1.0),
    }
    flat = mb.reshape(x=boxes, shape=[-1, count])
    if context.opset >= ct.target.iOS17:
        result = _crop_ios17(image, flat, count, settings, context)
    else:
        result = mb.crop_resize(x=image, roi=mb.reshape(x=boxes, shape=[-1, 1, count, 1, 1]), **settings)
    # [N, images, C, height, width]; the classic mapping has boxes and images on one axis
    if context.classic:
        return mb.reshape(x=result, shape=[-1, int(image.shape[1]), height, width])
    return result


def _crop_ios17(image: Var, flat: Var, count: int, settings: dict[str, Any], context: LayerContext) -> Var:
    """Crop with the op of iOS 17, which takes indices of images apart from the boxes."""
    if count == 5:
        indices = context.to_int(mb.squeeze(x=mb.slice_by_size(x=flat, begin=[0, 0], size=[-1, 1]), axes=[1]))
        flat = mb.slice_by_size(x=flat, begin=[0, 1], size=[-1, 4])
    else:
        if image.shape[0] != 1:
            raise context.refuse(f"boxes without an index for {image.shape[0]} images", "expected one image")
        indices = np.zeros(int(flat.shape[0]), np.int32)
    settings = dict(settings)
    settings["spatial_scale"] = float(settings["spatial_scale"])
    found = mb.crop_resize(x=image, boxes=flat, box_indices=indices, pad_value=0.0, **settings)
    result: Var = mb.expand_dims(x=found, axes=[1])
    return result


@register_layer("reorganizeData")
def convert_reorganize(params: Any, context: LayerContext) -> Var:
    """Convert a move of blocks between space and channels."""
    x, restore = context.to_nchw(context.x)
    size = int(params.blockSize)
    mode = params.ReorganizationType.Name(params.mode)
    if mode == "SPACE_TO_DEPTH":
        return restore(mb.space_to_depth(x=x, block_size=size))
    if mode == "DEPTH_TO_SPACE":
        return restore(mb.depth_to_space(x=x, block_size=size))
    return restore(mb.pixel_shuffle(x=x, upscale_factor=size))
