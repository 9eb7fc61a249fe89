"""Convert convolutions, deconvolutions and fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import LayerContext, find_reshaped, register_layer, to_index
from .padding import pad_or_crop, read_border_amounts

_DEFAULT_KERNEL = (3, 3)


@register_layer("convolution")
def convert_convolution(params: Any, context: LayerContext) -> Var:
    """Convert a 2-D convolution or deconvolution, with weights in the layer or as a second input."""
    inputs = context.inputs()
    x, restore = context.to_nchw(inputs[0])
    groups = int(params.nGroups) or 1
    kernel = tuple(context.read_positive("kernelSize", _DEFAULT_KERNEL))
    strides = context.read_positive("stride", (1, 1))
    dilations = context.read_positive("dilationFactor", (1, 1))
    outputs, inner = int(params.outputChannels), int(params.kernelChannels)
    if len(inputs) > 1:
        if params.isDeconvolution:
            raise context.refuse("a deconvolution with computed weights", "expected weights in the layer")
        weight: Any = inputs[1]
        groups = 1
    elif params.isDeconvolution:
        flat = _find_flat_input(params, x, kernel)
        if flat is not None:
            x, kernel, strides, dilations = flat, kernel[1:], strides[1:], dilations[1:]
        weight = context.weights.make(params.weights, (inner, outputs // groups, *kernel), axis=1)
    else:
        weight = context.weights.make(params.weights, (outputs, inner, *kernel))
    bias = context.weights.read_optional(params.hasBias, params.bias, (outputs,), "bias")
    settings = {"x": x, "weight": weight, "strides": strides, "dilations": dilations, "groups": groups}
    if bias is not None:
        settings["bias"] = bias
    same = params.WhichOneof("ConvolutionPaddingType") == "same"
    top_left = same and params.same.asymmetryMode == params.same.TOP_LEFT_HEAVY
    if params.isDeconvolution:
        made = _convert_deconvolution(params, settings, kernel, same, top_left, context)
        return restore(made if made.rank == 4 else mb.expand_dims(x=made, axes=[2]))
    if same:
        return restore(mb.conv(**settings, pad_type="same_lower" if top_left else "same"))
    pads = read_border_amounts(params.valid.paddingAmounts, context)
    if any(pads):
        return restore(mb.conv(**settings, pad_type="custom", pad=pads))
    return restore(mb.conv(**settings, pad_type="valid"))


def _find_flat_input(params: Any, x: Var, kernel: Sequence[int]) -> Var | None:
    """Find the value of rank 3 to which an axis of height 1 was added for a deconvolution; None where there is none.

    The format has no 1-D layers. In one dimension, rewrites choose the axis that the ANE has wider kernels on.
    """
    height = params.valid.paddingAmounts.borderAmounts[:1]
    crops_height = any(each.startEdgeSize or each.endEdgeSize for each in height)
    if kernel[0] != 1 or x.shape[2] != 1 or crops_height or (params.outputShape and params.outputShape[0] != 1):
        return None
    return find_reshaped(x, [*x.shape[:2], x.shape[3]])


def _convert_deconvolution(
    params: Any, settings: dict[str, Any], kernel: Sequence[int], same: bool, top_left: bool, context: LayerContext,
) -> Var:
    """Make the full transposed convolution and crop it: this format crops by `padding`, or to `outputShape`."""
    x, strides = settings["x"], settings["strides"]
    spatial = x.rank - 2
    if any(each != 1 for each in settings["dilations"]):
        raise context.refuse("a dilated deconvolution", "expected dilations of 1")
    full: Var = mb.conv_transpose(**settings, pad_type="valid")
    sizes = [int(each) for each in params.outputShape][-spatial:]
    pads = read_border_amounts(params.valid.paddingAmounts, context)[-2 * spatial:]
    if not same and not sizes:
        return _crop_output(full, settings, [-each for each in pads])
    if any(not isinstance(each, (int, np.integer)) for each in x.shape[2:]):
        if same and not sizes:
            crops = []
            for extent, stride in zip(kernel, strides):
                extra = max(extent - stride, 0)
                before = (extra + 1) // 2 if top_left else extra // 2
                crops += [-before, -(extra - before)]
            return _crop_output(full, settings, crops)
        raise context.refuse("an output shape for an input of flexible shape", "expected a fixed input shape")
    wanted = sizes or [int(each) * stride for each, stride in zip(x.shape[2:], strides)]
    crops = []
    for axis, size in enumerate(wanted):
        extra = int(full.shape[2 + axis]) - size
        if same or extra < 0:
            before = (extra + 1) // 2 if top_left else extra // 2
            crops += [-before, -(extra - before)]
        else:
            before = pads[2 * axis]
            crops += [-before, -(extra - before)]
    return _crop_output(full, settings, crops)


def _crop_output(full: Var, settings: dict[str, Any], ends: Sequence[int]) -> Var:
    """Crop or pad a transposed convolution by its `ends`; by the op's own pads where both ends lose the same.

    Unequal pads of the op are avoided, as the ANE shifts what they leave.
    """
    crops = [-each for each in ends]
    if crops[::2] == crops[1::2] and min(crops) >= 0 and any(crops):
        result: Var = mb.conv_transpose(**settings, pad_type="custom", pad=crops)
        return result
    return pad_or_crop(full, ends)


@register_layer("convolution3d")
def convert_convolution3d(params: Any, context: LayerContext) -> Var:
    """Convert a 3-D convolution or deconvolution; its input has rank 5."""
    x = context.x
    if x.rank != 5:
        raise context.refuse(f"an input of rank {x.rank}", "expected rank 5")
    groups = int(params.nGroups) or 1
    kernel = (int(params.kernelDepth), int(params.kernelHeight), int(params.kernelWidth))
    outputs, inner = int(params.outputChannels), int(params.inputChannels)
    # The inner axis of a convolution holds the channels of one group.
    shape = (inner, outputs // groups, *kernel) if params.isDeconvolution else (outputs, inner // groups, *kernel)
    weight = context.weights.make(params.weights, shape, axis=1 if params.isDeconvolution else 0)
    bias = context.weights.read_optional(params.hasBias, params.bias, (outputs,), "bias")
    settings = {
        "x": x, "weight": weight, "groups": groups,
        "strides": [int(each) or 1 for each in (params.strideDepth, params.strideHeight, params.strideWidth)],
        "dilations": [int(each) or 1 for each in (params.dilationDepth, params.dilationHeight, params.dilationWidth)],
    }
    if bias is not None:
        settings["bias"] = bias
    custom = [int(each) for each in (
        params.customPaddingFront, params.customPaddingBack, params.customPaddingTop, params.customPaddingBottom,
        params.customPaddingLeft, params.customPaddingRight)]
    kind = params.PaddingType.Name(params.paddingType).lower()
    padding: dict[str, Any] = {"pad_type": kind, "pad": custom} if kind == "custom" else {"pad_type": kind}
    if not params.isDeconvolution:
        return mb.conv(**settings, **padding)
    if params.outputShape:
        settings["output_shape"] = [int(x.shape[0]), outputs, *(int(each) for each in params.outputShape)]
    return mb.conv_transpose(**settings, **padding)


@register_layer("innerProduct")
def convert_inner_product(params: Any, context: LayerContext) -> Var:
    """Convert a fully connected layer: on the last three axes together from rank 4 on, else on the last axis.

    With `int8DynamicQuantize` Core ML rounds the input to 8 bits as well; here it is not rounded.
    """
    x = context.x
    inner, outputs = int(params.inputChannels), int(params.outputChannels)
    weight = context.weights.make(params.weights, (outputs, inner))
    bias = context.weights.read_optional(params.hasBias, params.bias, (outputs,), "bias")
    more = {} if bias is None else {"bias": bias}
    if x.rank >= 4:  # on the last three axes together, in either mapping
        rest = x.rank - 4
        flat = mb.reshape(x=x, shape=[-1, inner])
        result = mb.linear(x=flat, weight=weight, **more)
        if not rest:
            return mb.reshape(x=result, shape=[-1, outputs, 1, 1])
        leading = mb.slice_by_size(x=mb.shape(x=x), begin=[0], size=[x.rank - 3])
        return mb.reshape(x=result, shape=mb.concat(values=[leading, np.array([outputs, 1, 1], np.int32)], axis=0))
    if x.rank == 1:
        return mb.squeeze(x=mb.linear(x=mb.expand_dims(x=x, axes=[0]), weight=weight, **more), axes=[0])
    return mb.linear(x=x, weight=weight, **more)


@register_layer("batchedMatmul")
def convert_batched_matmul(params: Any, context: LayerContext) -> Var:
    """Convert a matrix product of two values, or of one with a weight matrix of the layer."""
    inputs = context.inputs()
    if len(inputs) == 2:
        return _build_matmul(inputs[0], inputs[1], bool(params.transposeA), bool(params.transposeB))
    first, second = int(params.weightMatrixFirstDimension), int(params.weightMatrixSecondDimension)
    weight = context.weights.make(params.weights, (second, first))
    bias = context.weights.read_optional(params.hasBias, params.bias, (second,), "bias")
    x = inputs[0]
    if params.transposeA:
        x = mb.transpose(x=x, perm=[*range(x.rank - 2), x.rank - 1, x.rank - 2])
    if x.rank in (2, 3) and not params.transposeB:
        return mb.linear(x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    result: Var = mb.matmul(x=x, y=weight, transpose_y=not params.transposeB)
    return result if bias is None else mb.add(x=result, y=bias)


def _build_matmul(x: Var, y: Var, transpose_x: bool, transpose_y: bool) -> Var:
    """Multiply two values; a vector is a row on the left and a column on the right, and stays one in the result."""
    if x.rank == 1:
        x, transpose_x = mb.expand_dims(x=x, axes=[0]), False
    if y.rank == 1:
        y, transpose_y = mb.expand_dims(x=y, axes=[1]), False
    result: Var = mb.matmul(x=x, y=y, transpose_x=transpose_x, transpose_y=transpose_y)
    return result


@register_layer("embedding", "embeddingND")
def convert_embedding(params: Any, context: LayerContext) -> Var:
    """Convert an embedding table: each index selects a column of the stored matrix."""
    rows = int(params.inputDim if hasattr(params, "inputDim") else params.vocabSize)
    columns = int(params.outputChannels if hasattr(params, "outputChannels") else params.embeddingSize)
    stored = context.weights.make(params.weights, (columns, rows))
    bias = context.weights.read_optional(params.hasBias, params.bias, (columns,), "bias")
    table = mb.transpose(x=stored, perm=[1, 0]) if isinstance(stored, Var) else np.ascontiguousarray(stored.T)
    x = context.x
    if hasattr(params, "inputDim"):  # [N, 1, 1, 1] or [.., 1] -> [N, columns, 1, 1]
        fixed = all(isinstance(each, (int, np.integer)) for each in x.shape)
        ids = find_reshaped(x, [math.prod(x.shape)]) if fixed else None
        found = _look_up(table, mb.reshape(x=x, shape=[-1]) if ids is None else ids, rows, bias, context)
        if context.classic or x.rank == 4:
            return mb.reshape(x=found, shape=[-1, columns, 1, 1])
        if x.rank == 5:
            leading = mb.slice_by_size(x=mb.shape(x=x), begin=[0], size=[2])
            return mb.reshape(x=found, shape=mb.concat(values=[leading, np.array([columns, 1, 1], np.int32)], axis=0))
        return found
    if x.rank > 1:
        if x.shape[-1] != 1:
            raise context.refuse(f"indices of shape {tuple(x.shape)}", "expected a last axis of 1")
        ids = find_reshaped(x, x.shape[:-1])
        x = mb.squeeze(x=x, axes=[-1]) if ids is None else ids
    return _look_up(table, x, rows, bias, context)


def _look_up(table: Any, ids: Var, rows: int, bias: np.ndarray[Any, Any] | None, context: LayerContext) -> Var:
    """Gather rows of `table` by `ids`, which the format has from 0 to `rows - 1`, and add the bias."""
    found: Var = mb.gather(x=table, indices=to_index(ids, rows, context), axis=0)
    return found if bias is None else mb.add(x=found, y=bias)
