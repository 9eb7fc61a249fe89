"""Resizing, cropping and resampling of images (the last two axes; `resize` takes any number of last axes)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..registry import register_kernel


def make_grid(first: torch.Tensor, last: torch.Tensor, count: int, mode: str) -> torch.Tensor:
    """Place `count` points between the centres of the elements `first` and `last`, by coremltools' sampling modes.

    No point is outside the interval: the documented formulas imply this for an entire axis, and NeuralNetwork.proto for
    any interval. If `last` is before `first` (neither source documents this), the points are those of the reversed
    interval, mirrored.
    """
    index, length = torch.arange(count, dtype=first.dtype), (last - first).abs()
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        centre = length / 2 if mode == "ALIGN_CORNERS" else 0 * length
        steps = index * (length / (count - 1)) if count > 1 else centre + index
    elif mode == "OFFSET_CORNERS":
        steps = (index + 0.5) * (length.clamp(min=1.0) / count)
    elif mode == "UNALIGN_CORNERS":
        steps = (index + 0.5) * ((length + 1) / count) - 0.5
    else:
        steps = index * ((length + 1) / count)
    return first + torch.sign(last - first) * torch.minimum(steps.clamp(min=0.0), length)


def _make_axis_grid(extent: int, count: int, mode: str) -> torch.Tensor:
    """Make the grid over a whole axis, in float64: it must not depend on the precision of the image."""
    ends = torch.tensor([0.0, extent - 1.0], dtype=torch.float64)
    return make_grid(ends[0], ends[1], count, mode)


def _interpolate_axis(x: torch.Tensor, axis: int, points: torch.Tensor) -> torch.Tensor:
    """Interpolate `x` linearly at `points` of one axis."""
    low = points.floor().long()
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    weight = (points - low).to(x.dtype).reshape([-1 if each == axis else 1 for each in range(x.dim())])
    below, above = torch.index_select(x, axis, low), torch.index_select(x, axis, high)
    return _interpolate_pair(below, above, weight)


def _interpolate_pair(below: torch.Tensor, above: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Interpolate between two elements. Weight 0 returns `below` itself: infinity times weight zero would be NaN."""
    return torch.where(weight == 0, below, below * (1 - weight) + above * weight)


def _resize_linear(x: torch.Tensor, sizes: list[int], mode: str) -> torch.Tensor:
    """Resize the last axes of `x` to `sizes` by linear interpolation."""
    x = x if x.is_floating_point() else x.double()
    for axis, size in enumerate(sizes, start=x.dim() - len(sizes)):
        x = _interpolate_axis(x, axis, _make_axis_grid(x.shape[axis], size, mode))
    return x


def _resize_nearest(x: torch.Tensor, sizes: list[int], centred: bool) -> torch.Tensor:
    """Resize the last axes of `x` to `sizes` by nearest neighbor.

    Selects element `floor(i * in / out)`, or with `centred`, for pixels with centres, `floor((i + 1/2) * in / out)`.
    """
    for axis, size in enumerate(sizes, start=x.dim() - len(sizes)):
        index = (2 * torch.arange(size) + int(centred)) * x.shape[axis] // (2 * size)
        x = torch.index_select(x, axis, index)
    return x


def _compute_scaled_sizes(op: Any, ins: Any) -> list[int]:
    """Return the declared height and width of the result; dynamic ones are scaled in float32.

    Since numpy 2, type inference computes in float32, so 0.7 times 10 is 7. Before numpy 2 it multiplied in float64, in
    which the float32 nearest to 0.7 gives less than 7.
    """
    factors = (np.float32(ins.value(f"scale_factor_{side}")) for side in ("height", "width"))
    return [math.floor(factor * np.float32(extent)) if is_symbolic(declared) else int(declared)
            for declared, extent, factor in zip(op.outputs[0].shape[-2:], ins["x"].shape[-2:], factors)]


@register_kernel("upsample_nearest_neighbor")
def upsample_nearest_neighbor(op: Any, ins: Any) -> torch.Tensor:
    """Resize by nearest neighbor without half-pixel centres.

    The documentation does not specify the choice of elements. torch's `nearest` and TensorFlow's resize without
    half-pixel centres convert to this op.
    """
    return _resize_nearest(ins["x"], _compute_scaled_sizes(op, ins), centred=False)


@register_kernel("resize_nearest_neighbor")
def resize_nearest_neighbor(op: Any, ins: Any) -> torch.Tensor:
    """Resize by nearest neighbor with half-pixel centres.

    The documentation does not specify the choice of elements. TensorFlow's resize with half-pixel centres converts to
    this op.
    """
    return _resize_nearest(ins["x"], [ins.value("target_size_height"), ins.value("target_size_width")], centred=True)


@register_kernel("upsample_bilinear")
def upsample_bilinear(op: Any, ins: Any) -> torch.Tensor:
    mode = "STRICT_ALIGN_CORNERS" if ins.value("align_corners") else "UNALIGN_CORNERS"
    if ins.accepts("half_pixel_centers") and ins.value("half_pixel_centers") is False and mode == "UNALIGN_CORNERS":
        mode = "DEFAULT"
    return _resize_linear(ins["x"], _compute_scaled_sizes(op, ins), mode)


@register_kernel("resize_bilinear")
def resize_bilinear(op: Any, ins: Any) -> torch.Tensor:
    sizes = [ins.value("target_size_height"), ins.value("target_size_width")]
    return _resize_linear(ins["x"], sizes, ins.value("sampling_mode"))


@register_kernel("resize")
def resize(op: Any, ins: Any) -> torch.Tensor:
    """Resize the last axes, linearly or by nearest neighbor.

    `NEAREST_NEIGHBOR` in its default mode is `resize_nearest_neighbor`: the documentation says that it includes this
    op. In the other modes, which are not documented, it selects the element nearest to each point of the grid, and the
    higher one of two equally near elements. Integers are interpolated in float64 and truncated.
    """
    x, count = ins["x"], ins.value("resized_dims")
    required = ins.values("shape")[-count:] if count else []
    sizes = [size or extent for size, extent in zip(required, x.shape[x.dim() - count :])]
    if ins.value("interpolation_mode") == "LINEAR":
        return _resize_linear(x, sizes, ins.value("sampling_mode"))
    if ins.value("sampling_mode") in ("DEFAULT", "UNALIGN_CORNERS"):
        return _resize_nearest(x, sizes, centred=True)
    for axis, size in enumerate(sizes, start=x.dim() - count):
        points = _make_axis_grid(x.shape[axis], size, ins.value("sampling_mode"))
        x = torch.index_select(x, axis, (points + 0.5).floor().long().clamp(max=x.shape[axis] - 1))
    return x


@register_kernel("crop")
def crop(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    (top, bottom), (left, right) = ins.values("crop_height"), ins.values("crop_width")
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]


def sample_points(
    image: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, fill: float | None, nearest: bool = False
) -> torch.Tensor:
    """Sample `image` (C, H, W) at the points (rows, columns).

    Elements outside the image are `fill`, or the nearest edge element if it is None. A point that is NaN (not
    documented) counts as 0. All points beyond the first element outside give the same value.
    """
    rows, columns = (
        points.nan_to_num(0.0).clamp(-1.0, extent) for points, extent in zip((rows, columns), image.shape[-2:])
    )
    if nearest:
        return _gather_pixels(image, rows.round(), columns.round(), fill)
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top).to(image.dtype), (columns - left).to(image.dtype)
    upper = _interpolate_pair(_gather_pixels(image, top, left, fill), _gather_pixels(image, top, left + 1, fill), right)
    lower = _interpolate_pair(
        _gather_pixels(image, top + 1, left, fill), _gather_pixels(image, top + 1, left + 1, fill), right
    )
    return _interpolate_pair(upper, lower, down)


def _gather_pixels(image: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, fill: float | None) -> torch.Tensor:
    height, width = image.shape[-2:]
    found = image[:, rows.clamp(0, height - 1).long(), columns.clamp(0, width - 1).long()]
    if fill is None:
        return found
    inside = (rows >= 0) & (rows <= height - 1) & (columns >= 0) & (columns <= width - 1)
    return torch.where(inside, found, torch.tensor(fill, dtype=image.dtype))


def _read_box(corners: list[float], ins: Any, height: int, width: int) -> list[torch.Tensor]:
    """Read a box as [first row, first column, last row, last column], in elements."""
    mode = ins.value("box_coordinate_mode")
    a, b, c, d = (torch.tensor(float(each), dtype=torch.float64) for each in corners)
    if mode.endswith("WIDTH_FIRST"):
        a, b, c, d = b, a, d, c
    if mode.startswith("CENTER_SIZE"):
        a, b, c, d = a - c / 2, b - d / 2, a + c / 2, b + d / 2
    scale = ins.value("spatial_scale")
    if ins.value("normalized_coordinates"):
        return [a * scale * (height - 1), b * scale * (width - 1), c * scale * (height - 1), d * scale * (width - 1)]
    return [a * scale, b * scale, c * scale, d * scale]


def _crop_and_resize(image: torch.Tensor, corners: list[float], ins: Any) -> torch.Tensor:
    height, width = image.shape[-2:]
    top, left, bottom, right = _read_box(corners, ins, height, width)
    mode = ins.value("sampling_mode")
    rows = make_grid(top, bottom, ins.value("target_height"), mode)[:, None]
    columns = make_grid(left, right, ins.value("target_width"), mode)[None, :]
    fill = ins.value("pad_value") if ins.accepts("pad_value") else 0.0
    # A point outside the image gets the padding value; a point inside never mixes with it.
    y = sample_points(image, rows, columns, None)
    inside = (rows >= 0) & (rows <= height - 1) & (columns >= 0) & (columns <= width - 1)
    return torch.where(inside, y, torch.tensor(fill, dtype=image.dtype))


@register_kernel("crop_resize")
def crop_resize(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    if ins.accepts("boxes"):
        boxes = ins["boxes"].tolist()
        indices = ins.values("box_indices") if ins.var("box_indices") is not None else range(len(boxes))
        made, leading = [_crop_and_resize(x[index], box, ins) for index, box in zip(indices, boxes)], x.shape[1:2]
    elif ins["roi"].shape[2] == 5:
        rois = ins["roi"].flatten(1).tolist()
        made, leading = [_crop_and_resize(x[int(roi[0])], roi[1:], ins)[None] for roi in rois], (1, x.shape[1])
    else:
        rois = ins["roi"].flatten(1).tolist()
        made, leading = [torch.stack([_crop_and_resize(image, roi, ins) for image in x]) for roi in rois], x.shape[:2]
    # A detector may find nothing: zero boxes give zero crops.
    empty = (0, *leading, ins.value("target_height"), ins.value("target_width"))
    return torch.stack(made) if made else x.new_zeros(empty)


def _unnormalize_points(points: torch.Tensor, extent: int, mode: str, align_corners: bool) -> torch.Tensor:
    """Convert coordinates to units of elements."""
    if mode == "unnormalized":
        return points
    if mode == "normalized_minus_one_to_one":
        points = (points + 1) / 2
    return points * (extent - 1) if align_corners else points * extent - 0.5


def _reflect_points(points: torch.Tensor, extent: int, padding: str) -> torch.Tensor:
    """Mirror points outside back inside.

    The mirrors are the centres of the edge elements (reflection) or their borders (symmetric).
    """
    low, span = (0.0, extent - 1.0) if padding == "reflection" else (-0.5, float(extent))
    if span == 0:
        return torch.zeros_like(points)
    away = (points - low).abs() % (2 * span)
    return torch.where(away > span, 2 * span - away, away) + low


@register_kernel("resample")
def resample(op: Any, ins: Any) -> torch.Tensor:
    x, coordinates = ins["x"], ins["coordinates"].double()
    padding, align = ins.value("padding_mode"), bool(ins.value("align_corners"))
    points = []
    for axis, extent in ((1, x.shape[-2]), (0, x.shape[-1])):
        each = _unnormalize_points(coordinates[..., axis], extent, ins.value("coordinates_mode"), align)
        points.append(_reflect_points(each, extent, padding) if padding in ("reflection", "symmetric") else each)
    fill = ins.value("padding_value") if padding == "constant" else None
    nearest = ins.value("sampling_mode") == "nearest"
    rows, columns = points
    return torch.stack([sample_points(x[each], rows[each], columns[each], fill, nearest) for each in range(x.shape[0])])


def _make_centered_points(count: int) -> torch.Tensor:
    """Place `count` points from -1 to 1; a single one (not documented) at 0, as in torch's `affine_grid`."""
    return torch.linspace(-1.0, 1.0, count, dtype=torch.float64) if count > 1 else torch.zeros(1, dtype=torch.float64)


@register_kernel("affine")
def affine(op: Any, ins: Any) -> torch.Tensor:
    x, height, width = ins["x"], ins.value("output_height"), ins.value("output_width")
    matrices = ins["transform_matrix"].double().expand(x.shape[0], 6)
    columns, rows = _make_centered_points(width)[None, :], _make_centered_points(height)[:, None]
    made = []
    for image, (a0, a1, a2, b0, b1, b2) in zip(x, matrices):
        across = _unnormalize_points(a0 * columns + a1 * rows + a2, x.shape[-1], "normalized_minus_one_to_one", True)
        down = _unnormalize_points(b0 * columns + b1 * rows + b2, x.shape[-2], "normalized_minus_one_to_one", True)
        made.append(sample_points(image, down, across, ins.value("padding_value")))
    return torch.stack(made)
