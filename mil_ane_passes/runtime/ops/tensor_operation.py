"""Ops that create, join, split, sort and select."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.mil import types
from torch.nn import functional

from ..registry import register_kernel


@register_kernel("identity")
def identity(op: Any, ins: Any) -> Any:
    return ins["x"]


@register_kernel("shape")
def shape(op: Any, ins: Any) -> torch.Tensor:
    return torch.tensor(ins["x"].shape, dtype=torch.int32)


@register_kernel("fill")
def fill(op: Any, ins: Any) -> torch.Tensor:
    return ins["value"].reshape(()).expand(ins.values("shape"))


@register_kernel("fill_like")
def fill_like(op: Any, ins: Any) -> torch.Tensor:
    return ins["value"].reshape(()).expand(ins["ref_tensor"].shape)


@register_kernel("range_1d")
def range_1d(op: Any, ins: Any) -> torch.Tensor:
    """Count from `start` to `end` in steps of `step`.

    The length is computed in the declared dtype at every precision, as in type inference and numpy.
    """
    start, step = ins["start"], ins["step"]
    declared = types.nptype_from_builtin(ins.var("start").dtype)
    first, end, spacing = (declared(ins.value(name)) for name in ("start", "end", "step"))
    if spacing == 0:
        raise ZeroDivisionError("step is 0")
    count = max(math.ceil((end - first) / spacing), 0)
    return start + torch.arange(count, dtype=start.dtype) * step


@register_kernel("concat")
def concat(op: Any, ins: Any) -> torch.Tensor:
    values, axis = ins["values"], ins.value("axis")
    if values[0].dim() == 0:
        return torch.stack(values, axis)
    if not ins.value("interleave"):
        return torch.cat(values, axis)
    axis %= values[0].dim()
    return torch.stack(values, axis + 1).flatten(axis, axis + 1)


@register_kernel("stack")
def stack(op: Any, ins: Any) -> torch.Tensor:
    return torch.stack(ins["values"], ins.value("axis"))


@register_kernel("split")
def split(op: Any, ins: Any) -> Any:
    x, axis = ins["x"], ins.value("axis")
    sizes = ins.values("split_sizes")
    if not sizes:
        count = ins.value("num_splits")
        sizes = [x.shape[axis] // count] * count
    return torch.split(x, sizes, axis)


@register_kernel("flatten2d")
def flatten2d(op: Any, ins: Any) -> torch.Tensor:
    x, axis = ins["x"], ins.value("axis")
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@register_kernel("tile")
def tile(op: Any, ins: Any) -> torch.Tensor:
    return ins["x"].repeat(ins.values("reps"))


@register_kernel("pad")
def pad(op: Any, ins: Any) -> torch.Tensor:
    """Pad the last axes; modes other than `constant` select indices in the same way as numpy."""
    x, amounts, mode = ins["x"], ins.values("pad"), ins.value("mode")
    pairs = list(zip(amounts[::2], amounts[1::2]))
    if mode == "constant":
        value = ins.value("constant_val")
        return functional.pad(x, [amount for pair in reversed(pairs) for amount in pair], value=value)
    for axis, pair in enumerate(pairs, start=x.dim() - len(pairs)):
        chosen = np.pad(np.arange(x.shape[axis]), pair, mode="edge" if mode == "replicate" else "reflect")
        x = torch.index_select(x, axis, torch.from_numpy(chosen))
    return x


@register_kernel("band_part")
def band_part(op: Any, ins: Any) -> torch.Tensor:
    x, lower, upper = ins["x"], ins.value("lower"), ins.value("upper")
    below = torch.arange(x.shape[-2])[:, None] - torch.arange(x.shape[-1])
    inside = torch.ones_like(below, dtype=torch.bool)
    if lower >= 0:
        inside &= below <= lower
    if upper >= 0:
        inside &= -below <= upper
    return torch.where(inside, x, torch.zeros((), dtype=x.dtype))


@register_kernel("cumsum")
def cumsum(op: Any, ins: Any) -> torch.Tensor:
    x, axis = ins["x"], ins.value("axis")
    if ins.value("reverse"):
        x = x.flip(axis)
    y = torch.cumsum(x, axis, dtype=x.dtype)
    if ins.value("exclusive"):
        zeros = torch.zeros_like(y.narrow(axis, 0, min(1, y.shape[axis])))
        y = torch.cat([zeros, y.narrow(axis, 0, max(y.shape[axis] - 1, 0))], axis)
    return y.flip(axis) if ins.value("reverse") else y


@register_kernel("argsort")
def argsort(op: Any, ins: Any) -> torch.Tensor:
    return _sort_indices(ins["x"], ins.value("axis"), bool(ins.value("ascending")))


def _sort_indices(x: torch.Tensor, axis: int, ascending: bool) -> torch.Tensor:
    """Return the indices that sort `x` along `axis`.

    Two choices are not documented: equal elements keep their order, and NaN comes last in both directions, as in
    coremltools' inference.
    """
    if x.is_floating_point() and not ascending:
        return torch.argsort(-x, dim=axis, stable=True)
    return torch.argsort(x, dim=axis, descending=not ascending, stable=True)


@register_kernel("topk")
def topk(op: Any, ins: Any) -> Any:
    """Return the k largest or smallest, always sorted: the documentation guarantees no order without `sort`."""
    x, axis, k = ins["x"], ins.value("axis"), ins.value("k")
    count = x.shape[axis] if k == -1 else k
    indices = _sort_indices(x, axis, bool(ins.value("ascending"))).narrow(axis, 0, count)
    return (torch.take_along_dim(x, indices, axis), indices)[: len(op.outputs)]


@register_kernel("non_zero")
def non_zero(op: Any, ins: Any) -> torch.Tensor:
    return torch.nonzero(ins["x"])


@register_kernel("one_hot")
def one_hot(op: Any, ins: Any) -> torch.Tensor:
    """Make one-hot vectors; an index out of range gives a vector of only `off_value`."""
    indices, axis = ins["indices"], ins.value("axis")
    axis %= indices.dim() + 1
    places = torch.arange(int(ins.value("one_hot_vector_size")))
    places = places.reshape([-1 if each == axis else 1 for each in range(indices.dim() + 1)])
    return torch.where(indices.unsqueeze(axis) == places, ins["on_value"], ins["off_value"])


@register_kernel("non_maximum_suppression")
def non_maximum_suppression(op: Any, ins: Any) -> Any:
    """Select boxes in descending order of their best score; a box that overlaps an earlier one too much is dropped."""
    boxes, scores = ins["boxes"], ins["scores"]
    boxes_last = not ins.accepts("score_threshold")  # since iOS17, boxes are on the last axis
    if boxes_last:
        boxes, scores = boxes.mT, scores.mT
    threshold = -math.inf if boxes_last else ins.value("score_threshold")
    count = ins.value("max_boxes")
    kept_boxes = torch.zeros(boxes.shape[0], count, 4, dtype=boxes.dtype)
    kept_scores = torch.zeros(scores.shape[0], count, scores.shape[2], dtype=scores.dtype)
    kept_indices = torch.full((boxes.shape[0], count), -1, dtype=torch.int32)
    numbers = torch.zeros(boxes.shape[0], dtype=torch.int32)
    for batch in range(boxes.shape[0]):
        kept = _select_boxes(boxes[batch], scores[batch], threshold, ins)[:count]
        numbers[batch] = len(kept)
        kept_boxes[batch, : len(kept)] = boxes[batch, kept]
        kept_scores[batch, : len(kept)] = scores[batch, kept]
        kept_indices[batch, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
    if boxes_last:
        return kept_boxes.mT, kept_scores.mT, kept_indices
    return kept_boxes, kept_scores, kept_indices, numbers


def _select_boxes(boxes: torch.Tensor, scores: torch.Tensor, score_threshold: float, ins: Any) -> list[int]:
    best, classes = scores.max(-1)
    corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], -1)
    areas = boxes[:, 2] * boxes[:, 3]
    kept: list[int] = []
    for index in torch.argsort(best, descending=True, stable=True).tolist():
        if best[index] < score_threshold:
            continue
        rivals = [each for each in kept if not ins.value("per_class_suppression") or classes[each] == classes[index]]
        low = torch.maximum(corners[rivals, :2], corners[index, :2])
        high = torch.minimum(corners[rivals, 2:], corners[index, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        if not bool((shared / (areas[rivals] + areas[index] - shared) > ins.value("iou_threshold")).any()):
            kept.append(index)
    return kept
