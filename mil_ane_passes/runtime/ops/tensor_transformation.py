"""Ops that only move elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from ...ir.query import is_const
from ..registry import register_kernel


@register_kernel("expand_dims")
def expand_dims(op: Any, ins: Any) -> torch.Tensor:
    x, axes = ins["x"], ins.values("axes")
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@register_kernel("squeeze")
def squeeze(op: Any, ins: Any) -> torch.Tensor:
    """Remove axes declared with extent 1.

    Axes with another extent stay, as in torch, and so do symbolic axes even if their extent is 1. Type inference does
    the same, and the following ops were built for that rank.
    """
    x, declared = ins["x"], ins.var("x").shape
    axes = ins.values("axes") if ins.has("axes") else range(x.dim())
    known = len(declared) == x.dim()  # a rank that depends on a value is known only here
    return torch.squeeze(x, tuple(axis for axis in axes if not known or declared[axis] == 1))


@register_kernel("reshape")
def reshape(op: Any, ins: Any) -> torch.Tensor:
    """Reshape `x`.

    A 0 in the shape is replaced by the extent of `x` at the same position counted from the right, or by 1 if `x` has no
    axis there.
    """
    x, shape = ins["x"], ins.values("shape")
    for place in range(1, len(shape) + 1):
        if shape[-place] == 0:
            shape[-place] = x.shape[-place] if place <= x.dim() else 1
    return x.reshape(shape)


@register_kernel("reshape_like")
def reshape_like(op: Any, ins: Any) -> torch.Tensor:
    shape: list[int] = []
    for reference, begin, end, masked in zip(ins["ref_tensors"], ins["begins"], ins["ends"], ins["end_masks"]):
        shape += reference.shape[int(begin) : None if bool(masked) else int(end)]
    return ins["x"].reshape(shape)


@register_kernel("transpose")
def transpose(op: Any, ins: Any) -> torch.Tensor:
    return ins["x"].permute(ins.values("perm"))


@register_kernel("reverse")
def reverse(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    return torch.flip(x, ins.values("axes") if ins.has("axes") else list(range(x.dim())))


@register_kernel("reverse_sequence")
def reverse_sequence(op: Any, ins: Any) -> torch.Tensor:
    """Reverse the first `lengths[i]` steps of each batch element."""
    x, lengths = ins["x"], ins["lengths"].long()
    batch_axis, seq_axis = ins.value("batch_axis") % x.dim(), ins.value("seq_axis") % x.dim()
    steps = torch.arange(x.shape[seq_axis])
    order = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    moved = x.movedim((batch_axis, seq_axis), (0, 1))
    return moved[torch.arange(moved.shape[0])[:, None], order].movedim((0, 1), (batch_axis, seq_axis))


def _read_slices(ins: Any, rank: int) -> tuple[list[slice], list[int]]:
    """Return (one slice per axis, axes to squeeze), with Python's meaning of negative and out-of-range bounds."""
    strides = ins.values("stride") or [1] * rank
    begin_mask, end_mask, squeeze_mask = (
        ins.values(name) or [False] * rank for name in ("begin_mask", "end_mask", "squeeze_mask")
    )
    slices = []
    for axis, (begin, end) in enumerate(zip(ins.values("begin"), ins.values("end"))):
        first = None if begin_mask[axis] else begin
        if squeeze_mask[axis]:
            # Selects one element: "end" is ignored, so the stride is larger than any extent.
            slices.append(slice(first, None, 2**31 - 1))
        else:
            slices.append(slice(first, None if end_mask[axis] else end, strides[axis]))
    return slices, [axis for axis in range(rank) if squeeze_mask[axis]]


def _plan_slices(ins: Any, shape: torch.Size) -> tuple[list[tuple[int, range]], list[int]]:
    """Return the elements to select on each axis of which not all are, and the axes to squeeze."""
    slices, squeezed = _read_slices(ins, len(shape))
    selected = [range(*each.indices(extent)) for each, extent in zip(slices, shape)]
    return [(axis, each) for axis, each in enumerate(selected) if each != range(shape[axis])], squeezed


def _select_range(x: torch.Tensor, axis: int, selected: range) -> torch.Tensor:
    if selected.step < 0:  # torch does not support negative steps
        return torch.index_select(x, axis, torch.tensor(selected, dtype=torch.int64))
    if selected.step == 1:
        return x.narrow(axis, selected.start, len(selected))
    return x[(slice(None),) * axis + (slice(selected.start, selected.stop, selected.step),)]


@register_kernel("slice_by_index")
def slice_by_index(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    is_planned = is_const(ins.var("begin")) and is_const(ins.var("end"))
    selected, squeezed = ins.memo(x.shape, lambda: _plan_slices(ins, x.shape)) if is_planned else _plan_slices(
        ins, x.shape)
    for axis, each in selected:
        x = _select_range(x, axis, each)
    return x.reshape([extent for axis, extent in enumerate(x.shape) if axis not in squeezed]) if squeezed else x


@register_kernel("slice_by_size")
def slice_by_size(op: Any, ins: Any) -> torch.Tensor:
    """Slice by `begin` and `size`; a size of -1 selects all remaining elements.

    A slice that extends beyond `x` (not documented) cannot have its declared size, so an error is raised.
    """
    x = ins["x"]
    for axis, (begin, size) in enumerate(zip(ins.values("begin"), ins.values("size"))):
        first = begin + x.shape[axis] if begin < 0 else begin
        if first < 0:
            raise IndexError(f"axis {axis} has {x.shape[axis]} elements, 'begin' is {begin}")
        x = x.narrow(axis, first, x.shape[axis] - first if size < 0 else size)
    return x


@register_kernel("slice_update")
def slice_update(op: Any, ins: Any) -> torch.Tensor:
    updated = ins["x"].clone(memory_format=torch.contiguous_format)
    place = updated.numpy()[tuple(_read_slices(ins, updated.dim())[0])]  # numpy returns a view also for negative steps
    place[...] = ins["update"].reshape(place.shape).numpy()
    return updated


@register_kernel("sliding_windows")
def sliding_windows(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    axis = ins.value("axis") % x.dim()
    return x.unfold(axis, ins.value("size"), ins.value("stride")).movedim(-1, axis + 1)


@register_kernel("pixel_shuffle")
def pixel_shuffle(op: Any, ins: Any) -> torch.Tensor:
    return functional.pixel_shuffle(ins["x"], ins.value("upscale_factor"))


@register_kernel("pixel_unshuffle")
def pixel_unshuffle(op: Any, ins: Any) -> torch.Tensor:
    return functional.pixel_unshuffle(ins["x"], ins.value("downscale_factor"))


@register_kernel("depth_to_space")
def depth_to_space(op: Any, ins: Any) -> torch.Tensor:
    """Rearrange depth into space; the block offset is the outer part of the channel, unlike in `pixel_shuffle`."""
    x, block = ins["x"], ins.value("block_size")
    n, c, h, w = x.shape
    y = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // block**2, h * block, w * block)


@register_kernel("space_to_depth")
def space_to_depth(op: Any, ins: Any) -> torch.Tensor:
    x, block = ins["x"], ins.value("block_size")
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * block**2, h // block, w // block)


@register_kernel("space_to_batch")
def space_to_batch(op: Any, ins: Any) -> torch.Tensor:
    (top, bottom), (left, right) = ins.value("paddings")
    rows, columns = ins.values("block_shape")
    x = functional.pad(ins["x"], (left, right, top, bottom))
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // rows, rows, w // columns, columns).permute(3, 5, 0, 1, 2, 4)
    return y.reshape(n * rows * columns, c, h // rows, w // columns)


@register_kernel("batch_to_space")
def batch_to_space(op: Any, ins: Any) -> torch.Tensor:
    (top, bottom), (left, right) = ins.value("crops")
    rows, columns = ins.values("block_shape")
    x = ins["x"]
    n, c, h, w = x.shape
    batch = n // math.prod((rows, columns))
    y = x.reshape(rows, columns, batch, c, h, w).permute(2, 3, 4, 0, 5, 1).reshape(batch, c, h * rows, w * columns)
    return y[:, :, top : h * rows - bottom, left : w * columns - right]
