"""Convert layers that change shapes, order or number of elements: reshape, transpose, concat, split, slice, tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import LayerContext, keep_rank, read_indices, register_layer


def get_fixed_shape(x: Var) -> list[int] | None:
    """Return the shape of `x`, or None where a dimension is flexible."""
    if all(isinstance(each, (int, np.integer)) for each in x.shape):
        return [int(each) for each in x.shape]
    return None


@register_layer("copy")
def convert_copy(params: Any, context: LayerContext) -> Var:
    """Convert a second name of a value."""
    return context.x


@register_layer("reshape")
def convert_reshape(params: Any, context: LayerContext) -> Var:
    """Convert a reshape to [C, H, W] or [sequence, C, H, W], in the order of channels first or last."""
    x, restore = context.to_nchw(context.x)
    target = [int(each) for each in params.targetShape]
    if len(target) not in (3, 4):
        raise context.refuse(f"a target of {len(target)} axes", "expected 3 or 4")
    size = [-1, *target] if len(target) == 3 else target
    if params.mode == params.CHANNEL_LAST:
        flat = mb.transpose(x=x, perm=[0, 2, 3, 1])
        result = mb.transpose(x=mb.reshape(x=flat, shape=[size[0], size[2], size[3], size[1]]), perm=[0, 3, 1, 2])
    else:
        result = mb.reshape(x=x, shape=size)
    return restore(result) if len(target) == 3 else result


@register_layer("flatten")
def convert_flatten(params: Any, context: LayerContext) -> Var:
    """Convert a flatten of [C, H, W] to channels, in the order of channels first or last."""
    x, restore = context.to_nchw(context.x)
    if params.mode == params.CHANNEL_LAST:
        x = mb.transpose(x=x, perm=[0, 2, 3, 1])
    rest = [each for each in x.shape[1:]]
    if all(isinstance(each, (int, np.integer)) for each in rest):
        return restore(mb.reshape(x=x, shape=[-1, int(np.prod(rest)), 1, 1]))
    count = mb.slice_by_size(x=mb.shape(x=x), begin=[0], size=[1])
    shape = mb.concat(values=[count, np.array([-1, 1, 1], np.int32)], axis=0)
    return restore(mb.reshape(x=x, shape=shape))


@register_layer("permute")
def convert_permute(params: Any, context: LayerContext) -> Var:
    """Convert a permutation of [sequence, C, H, W]."""
    axes = [int(each) for each in params.axis]
    if sorted(axes) != [0, 1, 2, 3]:
        raise context.refuse(f"axes {axes}", "expected a permutation of 0, 1, 2, 3")
    x = context.x
    if x.rank == 5:  # the batch, axis 1, stays
        places = (0, 2, 3, 4)
        perm = [places[axes[0]], 1, *(places[each] for each in axes[1:])]
        return mb.transpose(x=x, perm=perm)
    x, restore = context.to_nchw(x)
    return restore(mb.transpose(x=x, perm=axes))


@register_layer("concat")
def convert_concat(params: Any, context: LayerContext) -> Var:
    """Convert a concat of channels, or of sequences."""
    return mb.concat(values=context.inputs(), axis=0 if params.sequenceConcat else -3)


@register_layer("concatND")
def convert_concat_nd(params: Any, context: LayerContext) -> Var:
    """Convert a concat on an axis."""
    return mb.concat(values=context.inputs(), axis=int(params.axis), interleave=bool(params.interleave))


@register_layer("stack")
def convert_stack(params: Any, context: LayerContext) -> Var:
    return mb.stack(values=context.inputs(), axis=int(params.axis))


@register_layer("split")
def convert_split(params: Any, context: LayerContext) -> Sequence[Var]:
    """Convert a split of the channels into equal parts."""
    context.check_outputs(1)
    return _split_axis(context.x, len(context.layer.output), -3, None)


@register_layer("splitND")
def convert_split_nd(params: Any, context: LayerContext) -> Sequence[Var]:
    """Convert a split on an axis, into parts of listed sizes or equal ones, of which the first may be 1 larger."""
    sizes = [int(each) for each in params.splitSizes] or None
    count = int(params.numSplits) or len(context.layer.output)
    context.check_outputs(count)
    extent = context.x.shape[context.normalize_axis(int(params.axis))]
    if sizes is None and isinstance(extent, (int, np.integer)) and extent % count:
        sizes = [int(extent) // count + int(at < extent % count) for at in range(count)]
    return _split_axis(context.x, count, int(params.axis), sizes)


def _split_axis(x: Var, count: int, axis: int, sizes: list[int] | None) -> Sequence[Var]:
    found = mb.split(x=x, num_splits=count, axis=axis) if sizes is None else mb.split(x=x, split_sizes=sizes, axis=axis)
    return list(found) if isinstance(found, (list, tuple)) else [found]


@register_layer("sequenceRepeat")
def convert_sequence_repeat(params: Any, context: LayerContext) -> Var:
    """Convert a repetition of the sequence."""
    return mb.tile(x=context.x, reps=[int(params.nRepetitions) or 1, *[1] * (context.x.rank - 1)])


@register_layer("slice")
def convert_slice(params: Any, context: LayerContext) -> Var:
    """Convert a slice of channels, height or width, with Python's meaning of negative ends."""
    x = context.x
    axis = x.rank - 3 + ("CHANNEL_AXIS", "HEIGHT_AXIS", "WIDTH_AXIS").index(params.SliceAxis.Name(params.axis))
    if axis < 0:
        raise context.refuse(f"a value of rank {x.rank}", "expected at least 3 axes")
    begin, end, stride = [0] * x.rank, [0] * x.rank, [1] * x.rank
    begin[axis], end[axis], stride[axis] = int(params.startIndex), int(params.endIndex), int(params.stride) or 1
    masks = [at != axis for at in range(x.rank)]
    return mb.slice_by_index(x=x, begin=begin, end=end, stride=stride, begin_mask=masks, end_mask=masks)


@register_layer("sliceStatic")
def convert_slice_static(params: Any, context: LayerContext) -> Var:
    """Convert a slice with constant ends and strides on all axes."""
    result: Var = mb.slice_by_index(
        x=context.x, begin=[int(each) for each in params.beginIds], end=[int(each) for each in params.endIds],
        stride=[int(each) for each in params.strides], begin_mask=list(params.beginMasks),
        end_mask=list(params.endMasks), **_get_squeeze_masks(params))
    return keep_rank(result)


def _get_squeeze_masks(params: Any) -> dict[str, list[bool]]:
    masks = list(params.squeezeMasks)
    return {"squeeze_mask": masks} if any(masks) else {}


@register_layer("sliceDynamic")
def convert_slice_dynamic(params: Any, context: LayerContext) -> Var:
    """Convert a slice with computed ends; parameters that are not inputs are read from the layer."""
    inputs = context.inputs()
    rank = inputs[0].rank
    whole = [read_indices(each, context) for each in inputs[1:]]
    begin = whole[0]
    end = whole[1] if len(whole) > 1 else [int(each) for each in params.endIds]
    stride: Any = [int(each) for each in params.strides] or [1] * rank
    masks = {"begin_mask": list(params.beginMasks) or [False] * rank,
             "end_mask": list(params.endMasks) or [False] * rank}
    squeeze = list(params.squeezeMasks)
    if len(whole) > 2:
        stride = whole[2]
    for at, name in ((3, "begin_mask"), (4, "end_mask")):
        if len(whole) > at:
            masks[name] = _require_constant(whole[at], name, context)
    if len(whole) > 5:
        squeeze = _require_constant(whole[5], "squeeze_mask", context)
    more = {"squeeze_mask": squeeze} if any(squeeze) else {}
    return keep_rank(mb.slice_by_index(x=inputs[0], begin=begin, end=end, stride=stride, **masks, **more))


def _require_constant(found: Any, what: str, context: LayerContext) -> list[bool]:
    if isinstance(found, Var):
        raise context.refuse(f"a {what} that is computed", "expected a constant")
    return [bool(each) for each in found]


@register_layer("sliceBySize")
def convert_slice_by_size(params: Any, context: LayerContext) -> Var:
    """Convert a slice of fixed size from a computed index on one axis."""
    x, begin = context.inputs()
    axis = context.normalize_axis(int(params.axis), x.rank)
    at = context.to_int(mb.reshape(x=begin, shape=[1]))
    size = [-1] * x.rank
    size[axis] = int(params.size)
    parts: list[Any] = [np.zeros(axis, np.int32)] if axis else []
    parts.append(at)
    if axis < x.rank - 1:
        parts.append(np.zeros(x.rank - 1 - axis, np.int32))
    begins = mb.concat(values=parts, axis=0) if len(parts) > 1 else at
    return mb.slice_by_size(x=x, begin=begins, size=size)


@register_layer("slidingWindows")
def convert_sliding_windows(params: Any, context: LayerContext) -> Var:
    """Convert sliding windows along an axis."""
    return mb.sliding_windows(x=context.x, axis=int(params.axis), size=int(params.windowSize),
                              stride=int(params.step) or 1)


@register_layer("tile")
def convert_tile(params: Any, context: LayerContext) -> Var:
    """Convert a repetition on each axis; the counts may be a second input."""
    inputs = context.inputs()
    x = inputs[0]
    reps: Any = read_indices(inputs[1], context) if len(inputs) > 1 else [int(each) for each in params.reps]
    missing = int(reps.shape[0] if isinstance(reps, Var) else len(reps)) - x.rank
    if missing > 0:
        x = mb.expand_dims(x=x, axes=list(range(missing)))
    if missing < 0:
        ones = np.ones(-missing, np.int32)
        reps = mb.concat(values=[ones, reps], axis=0) if isinstance(reps, Var) else [*ones, *reps]
    own = get_fixed_shape(x)
    if not isinstance(reps, Var):
        reps = [int(each) for each in reps]
        if own is not None:
            context.check_size(have * count for have, count in zip(own, reps))
    return mb.tile(x=x, reps=reps)


@register_layer("transpose")
def convert_transpose(params: Any, context: LayerContext) -> Var:
    return mb.transpose(x=context.x, perm=[int(each) for each in params.axes])


@register_layer("reverse")
def convert_reverse(params: Any, context: LayerContext) -> Var:
    """Convert a reversal of some axes."""
    axes = [at for at, chosen in enumerate(params.reverseDim) if chosen]
    return mb.reverse(x=context.x, axes=axes) if axes else mb.identity(x=context.x)


@register_layer("reverseSeq")
def convert_reverse_sequence(params: Any, context: LayerContext) -> Var:
    """Convert a reversal of the first elements of each sequence; their counts are the second input."""
    x, lengths = context.inputs()
    rank = x.rank
    return mb.reverse_sequence(
        x=x, lengths=context.to_int(mb.reshape(x=lengths, shape=[-1])), seq_axis=int(params.sequenceAxis) % rank,
        batch_axis=int(params.batchAxis) % rank)


@register_layer("squeeze")
def convert_squeeze(params: Any, context: LayerContext) -> Var:
    """Convert a removal of axes of one element; a value keeps at least one axis."""
    x = context.x
    if params.squeezeAll:
        axes = [at for at, extent in enumerate(x.shape) if extent == 1]
    else:
        axes = [int(each) for each in params.axes]
    if not axes:
        return mb.identity(x=x)
    return keep_rank(mb.squeeze(x=x, axes=axes))


@register_layer("expandDims")
def convert_expand_dims(params: Any, context: LayerContext) -> Var:
    return mb.expand_dims(x=context.x, axes=[int(each) for each in params.axes])


@register_layer("flattenTo2D")
def convert_flatten_2d(params: Any, context: LayerContext) -> Var:
    """Convert a merge of the axes before and from an axis."""
    return mb.flatten2d(x=context.x, axis=int(params.axis))


@register_layer("reshapeLike")
def convert_reshape_like(params: Any, context: LayerContext) -> Var:
    x, like = context.inputs()
    return mb.reshape(x=x, shape=get_fixed_shape(like) or mb.shape(x=like))


@register_layer("reshapeStatic")
def convert_reshape_static(params: Any, context: LayerContext) -> Var:
    return mb.reshape(x=context.x, shape=[int(each) for each in params.targetShape])


@register_layer("reshapeDynamic")
def convert_reshape_dynamic(params: Any, context: LayerContext) -> Var:
    x, shape = context.inputs()
    return mb.reshape(x=x, shape=read_indices(shape, context))


@register_layer("rankPreservingReshape")
def convert_rank_preserving_reshape(params: Any, context: LayerContext) -> Var:
    """Convert a reshape of the same rank, in which 0 keeps the size of an axis."""
    return mb.reshape(x=context.x, shape=[int(each) for each in params.targetShape])


def broadcast_to(x: Var, shape: Any, context: LayerContext) -> Var:
    """Repeat `x` to `shape` (a list, or a var of int32), which it broadcasts to."""
    target = [int(each) for each in shape] if not isinstance(shape, Var) else None
    if target is not None:
        context.check_size(target)
    rank = len(target) if target is not None else int(shape.shape[0])
    if rank > x.rank:
        x = mb.expand_dims(x=x, axes=list(range(rank - x.rank)))
    own = get_fixed_shape(x)
    if target is not None and own is not None:
        reps = [wide // have if have else 1 for wide, have in zip(target, own)]
        return mb.tile(x=x, reps=reps)
    counts = mb.floor_div(x=shape if isinstance(shape, Var) else np.array(target, np.int32), y=mb.shape(x=x))
    return mb.tile(x=x, reps=counts)


@register_layer("broadcastToStatic")
def convert_broadcast_static(params: Any, context: LayerContext) -> Var:
    return broadcast_to(context.x, [int(each) for each in params.targetShape], context)


@register_layer("broadcastToLike")
def convert_broadcast_like(params: Any, context: LayerContext) -> Var:
    x, like = context.inputs()
    return broadcast_to(x, get_fixed_shape(like) or mb.shape(x=like), context)


@register_layer("broadcastToDynamic")
def convert_broadcast_dynamic(params: Any, context: LayerContext) -> Var:
    x, shape = context.inputs()
    return broadcast_to(x, read_indices(shape, context), context)
