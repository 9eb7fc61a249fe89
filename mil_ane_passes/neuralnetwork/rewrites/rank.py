"""Layers of Core ML 3 for any rank, replaced by classic layers with the axes channel, height and width.

The ranks that classic layers accept are those of coremltools' validator of the format: Concat, Split, Softmax, Flatten
from 3 on, global pooling from 4 on, Reshape, Permute and LoadConstant 5 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..layer_converter import get_layer_kind
from ..layer_rewriting import Replacement, Result, rewrite_layer
from ..network_view import NetworkView, make_layer
from .arithmetic import format_shape

_AXES = {-3: "CHANNEL_AXIS", -2: "HEIGHT_AXIS", -1: "WIDTH_AXIS"}
_UNKNOWN = "the shape of its input is unknown"


def _count_from_back(axis: int, rank: int) -> int:
    return axis - rank if axis >= 0 else axis


@rewrite_layer("concatND", fixes="NN102")
def replace_concat(layer: Any, view: NetworkView) -> Result:
    """Replace a concat of channels by the classic one."""
    shapes = [view.get_shape(name) for name in layer.input]
    if any(shape is None for shape in shapes):
        return _UNKNOWN
    rank = len(shapes[0] or ())
    axis = _count_from_back(int(layer.concatND.axis), rank)
    if layer.concatND.interleave:
        return "it interleaves its inputs, which the classic concat does not support"
    if len(layer.input) < 2:
        return "it has one input; the classic concat has two or more"
    if any(name in view.constants for name in layer.input):
        return "one of its inputs is a constant, which the classic layers have at rank 5 only"
    if axis == -5:
        made = make_layer("concat", layer.name, layer.input, layer.output, view, layer)
        made.concat.sequenceConcat = True
        return Replacement([made], "classic concat of sequences")
    if axis != -3 or rank < 3:
        return (f"it concatenates axis {axis} of values of rank {rank}; the classic concat supports channels, axis "
                f"-3, at rank 3 or more")
    return Replacement([make_layer("concat", layer.name, layer.input, layer.output, view, layer)],
                       "classic concat of channels")


@rewrite_layer("splitND", fixes="NN102")
def replace_split(layer: Any, view: NetworkView) -> Result:
    """Replace a split of channels into equal parts by the classic one, and others of the last three axes by slices."""
    shape = view.get_shape(layer.input[0])
    if shape is None:
        return _UNKNOWN
    axis = _count_from_back(int(layer.splitND.axis), len(shape))
    size = shape[axis] if -len(shape) <= axis < 0 else None
    if axis not in _AXES or (axis == -3 and len(shape) < 3):
        return f"it splits axis {axis} of a value of rank {len(shape)}; classic layers split channels, height or width"
    if size is None:
        return "the size of the split axis is flexible"
    count = len(layer.output)
    parts = [int(each) for each in layer.splitND.splitSizes] or [size // count] * count
    if sum(parts) != size or len(parts) != count:
        return f"parts of {parts} do not make up the size {size}"
    if axis == -3 and len(set(parts)) == 1:
        made = make_layer("split", layer.name, layer.input, layer.output, view, layer)
        made.split.nOutputs = count
        return Replacement([made], f"classic split into {count}")
    ends = [0, *np.cumsum(parts).tolist()]
    return Replacement([_make_slice(layer, view, at, axis, begin, end)
                        for at, (begin, end) in enumerate(pairwise(ends))],
                       f"{count} slices of {_AXES[axis].removesuffix('_AXIS').lower()}")


def _make_slice(layer: Any, view: NetworkView, at: int, axis: int, begin: int, end: int) -> Any:
    name = view.make_name(f"{layer.name}_{at}")
    made = make_layer("slice", name, layer.input, [layer.output[at]], view, layer)
    made.slice.startIndex, made.slice.endIndex, made.slice.stride = begin, end, 1
    made.slice.axis = made.slice.SliceAxis.Value(_AXES[axis])
    return made


@rewrite_layer("softmaxND", fixes="NN102")
def replace_softmax(layer: Any, view: NetworkView) -> Result:
    """Replace a softmax over channels by the classic one."""
    shape = view.get_shape(layer.input[0])
    if shape is None:
        return _UNKNOWN
    axis = _count_from_back(int(layer.softmaxND.axis), len(shape))
    if axis != -3:
        return f"it runs over axis {axis} of rank {len(shape)}; the classic softmax runs over channels, axis -3"
    return Replacement([make_layer("softmax", layer.name, layer.input, layer.output, view, layer)],
                       "classic softmax over channels")


@rewrite_layer("loadConstantND", fixes="NN102")
def replace_constant(layer: Any, view: NetworkView) -> Result:
    """Replace a constant of rank 5 by the classic one; others are removed if all their users can store them."""
    shape = tuple(int(size) for size in layer.loadConstantND.shape)
    if len(shape) != 5 or shape[:2] != (1, 1):
        return (f"a classic constant has the shape [1, 1, C, H, W], this one {format_shape(shape)}; it is removed if "
                f"all its users can store it")
    made = make_layer("loadConstant", layer.name, [], layer.output, view, layer)
    made.loadConstant.shape.extend(shape[2:])
    made.loadConstant.data.CopyFrom(layer.loadConstantND.data)
    return Replacement([made], f"classic constant of shape {format_shape(shape[2:])}")


@rewrite_layer("transpose", fixes="NN102")
def replace_transpose(layer: Any, view: NetworkView) -> Result:
    """Replace a transpose at rank 5 that leaves the batch in place by the classic permute."""
    axes = [int(each) for each in layer.transpose.axes]
    if len(axes) != 5 or axes[1] != 1:
        return (f"it permutes {axes}; the classic permute has rank 5 and leaves axis 1, the batch, in place")
    made = make_layer("permute", layer.name, layer.input, layer.output, view, layer)
    places = (0, 2, 3, 4)
    made.permute.axis.extend(places.index(axes[place]) for place in places)
    return Replacement([made], f"classic permute {list(made.permute.axis)}")


@rewrite_layer("reshapeStatic", "rankPreservingReshape", fixes="NN102")
def replace_reshape(layer: Any, view: NetworkView) -> Result:
    """Replace a reshape to [C, 1, 1] by the classic flatten, and one at rank 5 by the classic reshape."""
    before, after = view.get_fixed_shape(layer.input[0]), view.get_fixed_shape(layer.output[0])
    if before is None or after is None:
        return "its input or its output has a flexible size"
    if len(before) != len(after) or len(before) < 3:
        return (f"it changes the rank from {len(before)} to {len(after)}; the classic reshape keeps rank 5, the "
                f"classic "
                "flatten a rank of 3 or more")
    if before[:-3] == after[:-3] and after[-2:] == (1, 1):
        return Replacement([make_layer("flatten", layer.name, layer.input, layer.output, view, layer)],
                           "classic flatten")
    if len(before) == 5 and before[:2] == after[:2] and before[1] == 1:
        made = make_layer("reshape", layer.name, layer.input, layer.output, view, layer)
        made.reshape.targetShape.extend(after[2:])
        return Replacement([made], f"classic reshape to {format_shape(after[2:])}")
    return (f"it makes {format_shape(after)} of {format_shape(before)}; the classic reshape has rank 5 and keeps "
            "sequence and batch, the flatten makes [.., C, 1, 1]")


@rewrite_layer("expandDims", "squeeze", "flattenTo2D", "stack", fixes="NN102")
def keep_rank_changes(layer: Any, view: NetworkView) -> Result:
    """Skip layers that change the rank, which classic layers do not support."""
    return f"{get_layer_kind(layer)} changes the rank of its value; classic layers keep it"


_MODES = {
    "reduceSum": "SUM", "reduceMean": "AVG", "reduceProd": "PROD", "reduceSumSquare": "SUMSQUARE", "reduceL1": "L1",
    "reduceL2": "L2", "reduceMax": "MAX", "reduceMin": "MIN", "argMax": "ARGMAX",
}
_REDUCED = {(-3, -2, -1): "CHW", (-2, -1): "HW", (-3,): "C", (-2,): "H", (-1,): "W"}
_POOLED = {"reduceMean": "AVERAGE", "reduceMax": "MAX"}


@rewrite_layer(*_MODES, fixes="NN102")
def replace_reduction(layer: Any, view: NetworkView) -> Result:
    """Replace a reduction of channels, height or width that keeps its axes by the classic one, or by global pooling."""
    kind, shape = get_layer_kind(layer), view.get_shape(layer.input[0])
    if shape is None:
        return _UNKNOWN
    params, rank = getattr(layer, kind), len(shape)
    if not (not params.removeDim if kind == "argMax" else params.keepDims):
        return "it drops the axes that it reduces; the classic reduction keeps them with size 1"
    axes = _read_axes(params, kind, rank)
    if axes not in _REDUCED or rank < 3 or (kind == "argMax" and len(axes) > 1):
        return f"it reduces axes {list(axes)} at rank {rank}; the classic reduction reduces CHW, HW, C, H or W"
    if kind in _POOLED and axes == (-2, -1) and rank >= 4:
        made = make_layer("pooling", layer.name, layer.input, layer.output, view, layer)
        made.pooling.type, made.pooling.globalPooling = made.pooling.PoolingType.Value(_POOLED[kind]), True
        return Replacement([made], f"classic global pooling ({_POOLED[kind].lower()})")
    made = make_layer("reduce", layer.name, layer.input, layer.output, view, layer)
    made.reduce.mode = made.reduce.ReduceOperation.Value(_MODES[kind])
    made.reduce.axis = made.reduce.ReduceAxis.Value(_REDUCED[axes])
    return Replacement([made], f"classic reduction of {_REDUCED[axes]}")


def _read_axes(params: Any, kind: str, rank: int) -> tuple[int, ...]:
    """Return the axes that are reduced, counted from the back, in order."""
    if kind == "argMax":
        return (_count_from_back(int(params.axis), rank),)
    listed: Sequence[int] = range(rank) if params.reduceAll or not params.axes else [int(each) for each in params.axes]
    return tuple(sorted(_count_from_back(axis, rank) for axis in listed))
