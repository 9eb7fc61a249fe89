"""Convert paddings and crops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import LayerContext, register_layer

_MODES = {"constant": "constant", "reflection": "reflect", "replication": "replicate"}


def read_border_amounts(amounts: Any, context: LayerContext) -> list[int]:
    """Return [top, bottom, left, right] of BorderAmounts; none means zeros."""
    if not amounts.borderAmounts:
        return [0, 0, 0, 0]
    if len(amounts.borderAmounts) != 2:
        raise context.refuse(f"{len(amounts.borderAmounts)} border amounts", "expected 2: height and width")
    return [int(end) for each in amounts.borderAmounts for end in (each.startEdgeSize, each.endEdgeSize)]


def pad_or_crop(x: Var, ends: Sequence[int], value: float = 0.0) -> Var:
    """Pad the last axes by the positive and crop them by the negative numbers, such as [top, bottom, left, right]."""
    others = x.rank - len(ends) // 2
    crops = [max(-each, 0) for each in ends]
    if any(crops):
        begin, end = [0] * others + crops[::2], [0] * others + [-each for each in crops[1::2]]
        x = mb.slice_by_index(x=x, begin=begin, end=end, end_mask=[not each for each in end])
    pads = [max(each, 0) for each in ends]
    if any(pads):
        x = mb.pad(x=x, pad=[0] * (2 * others) + pads, mode="constant", constant_val=value)
    return x


@register_layer("padding")
def convert_padding(params: Any, context: LayerContext) -> Var:
    """Convert a padding of height and width, by a number, by reflection or by the edge."""
    kind = params.WhichOneof("PaddingType") or "constant"
    pads = read_border_amounts(params.paddingAmounts, context)
    x, restore = context.to_nchw(context.x)
    if not any(pads):
        return mb.identity(x=context.x)
    if kind == "constant":
        return restore(pad_or_crop(x, pads, float(params.constant.value)))
    return restore(mb.pad(x=x, pad=pads, mode=_MODES[kind]))  # modes besides constant pad the last two axes at most


@register_layer("constantPad")
def convert_constant_pad(params: Any, context: LayerContext) -> Var:
    """Convert a padding of all axes by a number; amounts may be a second input."""
    inputs = context.inputs()
    x, value = inputs[0], float(params.value)
    if len(inputs) > 1:
        amounts = context.to_int(mb.reshape(x=inputs[1], shape=[-1]))
        if params.padToGivenOutputSizeMode:
            pads = _pad_to_sizes(x, amounts)
        elif amounts.val is not None:
            pads = np.asarray(amounts.val, np.int32)
        else:
            pads = amounts
        return mb.pad(x=x, pad=pads, mode="constant", constant_val=value)
    listed = np.array(params.padAmounts, np.int64)
    if listed.size != 2 * x.rank:
        raise context.refuse(f"{listed.size} amounts for a value of rank {x.rank}", f"expected {2 * x.rank}")
    if params.padToGivenOutputSizeMode:
        extents = [int(each) if isinstance(each, (int, np.integer)) else None for each in x.shape]
        if None in extents:
            raise context.refuse("a padding to given sizes of a value of flexible shape", "expected a fixed shape")
        for axis, extent in enumerate(extents):
            before, after = (int(each) for each in listed[2 * axis:2 * axis + 2])
            total = max(before, after)  # the size to reach, on the side of which the padding is
            spare = max(total - int(extent or 0), 0) if total else 0
            listed[2 * axis:2 * axis + 2] = (spare, 0) if before else (0, spare)
    return mb.pad(x=x, pad=listed.astype(np.int32), mode="constant", constant_val=value)


def _pad_to_sizes(x: Var, amounts: Var) -> Var:
    """Return the amounts that pad `x` to the sizes in `amounts`, on the side where a size is not 0."""
    pairs = mb.reshape(x=amounts, shape=[x.rank, 2])
    extents = mb.reshape(x=mb.shape(x=x), shape=[x.rank, 1])
    spare = mb.maximum(x=mb.sub(x=pairs, y=extents), y=np.int32(0))
    result: Var = mb.reshape(x=spare, shape=[2 * x.rank])
    return result


@register_layer("crop")
def convert_crop(params: Any, context: LayerContext) -> Var:
    """Convert a crop by amounts, or to the size of a second input from an offset."""
    inputs = context.inputs()
    x, restore = context.to_nchw(inputs[0])
    if len(inputs) == 1:
        return restore(pad_or_crop(x, [-each for each in read_border_amounts(params.cropAmounts, context)]))
    like, _ = context.to_nchw(inputs[1])
    top, left = (int(each) for each in (params.offset or (0, 0)))
    sizes = like.shape[-2:]
    if all(isinstance(each, (int, np.integer)) for each in sizes):
        end = [0, 0, top + int(sizes[0]), left + int(sizes[1])]
        return restore(mb.slice_by_index(x=x, begin=[0, 0, top, left], end=end, end_mask=[True, True, False, False]))
    length = mb.slice_by_size(x=mb.shape(x=like), begin=[2], size=[2])
    leading = mb.slice_by_size(x=mb.shape(x=x), begin=[0], size=[2])
    size = mb.concat(values=[leading, length], axis=0)
    return restore(mb.slice_by_size(x=x, begin=[0, 0, top, left], size=size))
