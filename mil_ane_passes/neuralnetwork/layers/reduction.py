"""Convert reductions, rankings and running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ...utils.option_spelling import format_option_values
from ..layer_converter import MIN_EPSILON, LayerContext, cast, keep_rank, register_layer

_AXES = {"CHW": [-3, -2, -1], "HW": [-2, -1], "C": [-3], "H": [-2], "W": [-1]}
_MODES: dict[str, Callable[..., Any]] = {
    "SUM": mb.reduce_sum, "AVG": mb.reduce_mean, "PROD": mb.reduce_prod, "SUMSQUARE": mb.reduce_sum_square,
    "L1": mb.reduce_l1_norm, "L2": mb.reduce_l2_norm, "MAX": mb.reduce_max, "MIN": mb.reduce_min,
}


@register_layer("reduce")
def convert_reduce(params: Any, context: LayerContext) -> Var:
    """Convert a reduction over some of channel, height and width, whose axes stay with one element."""
    mode, axes = params.ReduceOperation.Name(params.mode), _AXES[params.ReduceAxis.Name(params.axis)]
    x, restore = context.to_nchw(context.x)
    if mode == "ARGMAX":
        if len(axes) > 1:
            raise context.refuse("an argmax over several axes", "expected one of C, H and W")
        return restore(cast(mb.reduce_argmax(x=x, axis=axes[0], keep_dims=True), "fp32"))
    if mode == "LOGSUM":
        logarithm = mb.log(x=x, epsilon=max(float(params.epsilon), MIN_EPSILON))
        return restore(mb.reduce_sum(x=logarithm, axes=axes, keep_dims=True))
    return restore(_MODES[mode](x=x, axes=axes, keep_dims=True))


_KINDS: dict[str, Callable[..., Any]] = {
    "reduceL1": mb.reduce_l1_norm, "reduceL2": mb.reduce_l2_norm, "reduceMax": mb.reduce_max,
    "reduceMin": mb.reduce_min, "reduceSum": mb.reduce_sum, "reduceProd": mb.reduce_prod, "reduceMean": mb.reduce_mean,
    "reduceLogSum": mb.reduce_log_sum, "reduceSumSquare": mb.reduce_sum_square,
    "reduceLogSumExp": mb.reduce_log_sum_exp,
}


@register_layer(*_KINDS)
def convert_reduce_nd(params: Any, context: LayerContext) -> Var:
    """Convert a reduction over listed axes, or over all."""
    x = context.x
    axes = list(range(x.rank)) if params.reduceAll or not params.axes else [int(each) for each in params.axes]
    return keep_rank(_KINDS[context.layer.WhichOneof("layer")](x=x, axes=axes, keep_dims=bool(params.keepDims)))


@register_layer("argMax", "argMin")
def convert_arg(params: Any, context: LayerContext) -> Var:
    """Convert the index of the largest or smallest element, as a float."""
    find = mb.reduce_argmax if context.layer.WhichOneof("layer") == "argMax" else mb.reduce_argmin
    found = find(x=context.x, axis=int(params.axis), keep_dims=not params.removeDim)
    return keep_rank(cast(found, "fp32"))


@register_layer("topK")
def convert_top_k(params: Any, context: LayerContext) -> list[Var]:
    """Convert the K largest or smallest elements and their indices; K may be a second input.

    MIL's topk has a constant K: for one that is computed the whole axis is sorted, and the first K are sliced off.
    """
    inputs = context.inputs()
    x, k = inputs[0], int(params.K)
    axis = context.normalize_axis(int(params.axis), x.rank)
    computed = None
    if len(inputs) > 1:
        count = context.to_int(mb.reshape(x=inputs[1], shape=[1]))
        if count.val is None:
            computed, k = count, _get_extent(x, axis, context)
        else:
            k = int(np.asarray(count.val).reshape(-1)[0])
    values, indices = mb.topk(x=x, k=k or 1, axis=axis, ascending=bool(params.useBottomK))
    found = [values, cast(indices, "fp32")]
    return found if computed is None else [_take_first(each, computed, axis) for each in found]


def _get_extent(x: Var, axis: int, context: LayerContext) -> int:
    extent = x.shape[axis]
    if not isinstance(extent, (int, np.integer)):
        raise context.refuse("a K that is computed, of an axis of flexible size", "expected a constant K")
    return int(extent)


def _take_first(x: Var, count: Var, axis: int) -> Var:
    """Slice the first `count` (a var of one number) off an axis."""
    parts: list[Any] = [np.full(axis, -1, np.int32), count, np.full(x.rank - axis - 1, -1, np.int32)]
    parts = [each for each in parts if each.shape[0]]
    size = mb.concat(values=parts, axis=0) if len(parts) > 1 else count
    result: Var = mb.slice_by_size(x=x, begin=[0] * x.rank, size=size)
    return result


@register_layer("argSort")
def convert_arg_sort(params: Any, context: LayerContext) -> Var:
    """Convert the order of elements along an axis."""
    return cast(mb.argsort(x=context.x, axis=int(params.axis), ascending=not params.descending), "fp32")


@register_layer("cumSum")
def convert_cumsum(params: Any, context: LayerContext) -> Var:
    """Convert a running sum along an axis, which may be a second input."""
    inputs = context.inputs()
    axis = int(params.axis)
    if len(inputs) > 1:
        chosen = context.to_int(inputs[1])
        if chosen.val is None:
            raise context.refuse("an axis that is computed", "expected a constant axis")
        axis = int(np.asarray(chosen.val).reshape(-1)[0])
    axis = axis + inputs[0].rank if -inputs[0].rank <= axis < 0 else axis  # MIL accepts -1 of the negative ones
    return mb.cumsum(x=inputs[0], axis=axis, exclusive=bool(params.excludeFinalSum), reverse=bool(params.reverse))


@register_layer("NonMaximumSuppression")
def convert_nms(params: Any, context: LayerContext) -> list[Var]:
    """Convert a non-maximum suppression; thresholds may be inputs, as constants."""
    if context.opset >= ct.target.iOS17:
        raise context.refuse("it has a score threshold, which the op lacks from iOS17 on",
                             f"expected {format_option_values('deployment_target', 'iOS16')}")
    inputs = context.inputs()
    stored = [params.iouThreshold, params.scoreThreshold, params.maxBoxes]
    names = ("the IOU threshold", "the score threshold", "the number of boxes")
    for at, var in enumerate(inputs[2:5]):
        if var.val is None:
            raise context.refuse(f"{names[at]} is computed", "expected a constant, as MIL's op requires")
        stored[at] = np.asarray(var.val).reshape(-1)[0]
    boxes, scores, indices, counts = mb.non_maximum_suppression(
        boxes=inputs[0], scores=inputs[1], iou_threshold=float(stored[0]), score_threshold=float(stored[1]),
        max_boxes=int(stored[2]), per_class_suppression=bool(params.perClassSuppression))
    return [boxes, scores, cast(indices, "fp32"), cast(counts, "fp32")]
