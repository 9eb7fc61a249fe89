"""Constant boxes of crop_resize: the positions of their sample points, and the same crops by slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ..indexing._index_patterns import IndexPattern, Run, find_index_pattern
from ..indexing._indexed_reads import find_take_obstacle, slice_runs, take_indices

__all__ = ["Crop", "build_crop", "plan_crops"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AxisSampling:
    """The sample points along one axis: elements `low` of the slice `window`, mixed with `high` by `weights`.

    Without `low` it is the slice unchanged. `pad` counts the points before and after that lie outside of the image.
    """

    window: Run
    low: IndexPattern | None = None
    high: IndexPattern | None = None
    weights: tuple[float, ...] = ()
    pad: tuple[int, int] = (0, 0)
    exact: bool = True

    @property
    def parts(self) -> int:
        return sum(each.parts for each in (self.low, self.high) if each is not None)


@dataclass(frozen=True)
class Crop:
    """A box of the image `index` (None: of all images); `resized` where a slice and a resize_bilinear compute it."""

    index: int | None
    lines: tuple[AxisSampling, AxisSampling]
    resized: tuple[int, int, str] | None = None

    @property
    def parts(self) -> int:
        return 1 + sum(line.parts for line in self.lines)

    @property
    def is_bitwise(self) -> bool:
        return self.resized is None and not any(line.weights for line in self.lines)

    @property
    def exact(self) -> bool:
        return all(line.exact for line in self.lines)


def plan_crops(op: Operation) -> list[Crop] | str:
    """Plan the crop of each box, or return why one cannot be computed."""
    boxes = np.asarray((op.inputs.get("boxes") or op.inputs["roi"]).val).astype(np.float64)
    boxes = boxes.reshape(boxes.shape[0], -1 if boxes.size else 4)
    if not len(boxes) or not np.isfinite(boxes).all():
        return "no box at all" if not len(boxes) else "a box with an infinite or NaN corner"
    indices = _read_image_indices(op, boxes)
    if isinstance(indices, str):
        return indices
    found = []
    for index, corners in zip(indices, boxes[:, -4:]):
        crop = _plan_crop(op, index, corners)
        if isinstance(crop, str):
            return crop
        found.append(crop)
    return found


def _read_image_indices(op: Operation, boxes: Array) -> Sequence[int | None] | str:
    """Return the image index of each box, or why it cannot be read."""
    images = op.x.shape[0]
    if "boxes" in op.inputs:
        indices = get_const_value(op.inputs.get("box_indices"), list(range(len(boxes))))
    elif boxes.shape[1] == 5 and images != 1:
        return f"one image for each box, of {images}: its shape is documented with one image and inferred with all"
    else:
        indices = boxes[:, 0].astype(int).tolist() if boxes.shape[1] == 5 else [None] * len(boxes)
    wrong = [index for index in indices if index is not None and index < 0]
    return f"a box of image {wrong[0]}" if wrong else indices


def _plan_crop(op: Operation, index: int | None, corners: Array) -> Crop | str:
    sizes = get_const_value(op.target_height, 1), get_const_value(op.target_width, 1)
    mode, extents = get_const_value(op.sampling_mode, "DEFAULT"), [int(extent) for extent in op.x.shape[2:]]
    fill = get_const_value(op.inputs.get("pad_value"), 0.0)
    ends = _compute_box_ends(op, corners, extents)
    lines = []
    for (first, last), count, extent in zip(ends, sizes, extents):
        line = _plan_axis_sampling(op.x, _compute_sample_points(first, last, count, mode), extent)
        if isinstance(line, str):
            return line
        if any(line.pad) and fill:
            return f"a box that leaves the image, filled with {fill:g}: only zeros are padded"
        lines.append(line)
    inside = all(end == int(end) and 0 <= end < extent for pair, extent in zip(ends, extents) for end in pair)
    forward = all(first <= last for first, last in ends)
    if inside and forward and any(line.low is not None for line in lines):
        rows, columns = (AxisSampling(Run(int(first), 1, int(last - first) + 1)) for first, last in ends)
        return Crop(index, (rows, columns), (*sizes, mode))
    return Crop(index, (lines[0], lines[1]))


def _compute_box_ends(op: Operation, corners: Array, extents: list[int]) -> list[tuple[float, float]]:
    """Return the first and last row, and the first and last column, in elements."""
    mode = get_const_value(op.box_coordinate_mode, "CORNERS_HEIGHT_FIRST")
    a, b, c, d = (float(each) for each in corners)
    if mode.endswith("WIDTH_FIRST"):
        a, b, c, d = b, a, d, c
    if mode.startswith("CENTER_SIZE"):
        a, b, c, d = a - c / 2, b - d / 2, a + c / 2, b + d / 2
    scale = float(get_const_value(op.spatial_scale, 1.0))
    rows, columns = [extent - 1 for extent in extents] if get_const_value(op.normalized_coordinates, False) else (1, 1)
    return [(a * scale * rows, c * scale * rows), (b * scale * columns, d * scale * columns)]


def _compute_sample_points(first: float, last: float, count: int, mode: str) -> Array:
    """Compute the points of the documented sampling modes. No point leaves the interval, which may run backwards."""
    index, length = np.arange(count, dtype=np.float64), abs(last - first)
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        single = length / 2 if mode == "ALIGN_CORNERS" else 0.0
        steps = index * (length / (count - 1)) if count > 1 else single + index
    elif mode == "OFFSET_CORNERS":
        steps = (index + 0.5) * (max(length, 1.0) / count)
    elif mode == "UNALIGN_CORNERS":
        steps = (index + 0.5) * ((length + 1) / count) - 0.5
    else:
        steps = index * ((length + 1) / count)
    points: Array = first + np.sign(last - first) * np.minimum(np.maximum(steps, 0.0), length)
    return points


def _plan_axis_sampling(x: Var, points: Array, extent: int) -> AxisSampling | str:
    """Plan the slices and weights for `points`, or return why they cannot be sampled."""
    inside = np.flatnonzero((points >= 0) & (points <= extent - 1))
    if not len(inside):
        return "a box whose points are all outside of the image"
    pad = int(inside[0]), len(points) - 1 - int(inside[-1])
    points = points[inside]
    low = np.floor(points).astype(np.int64)
    weights = (points - low).astype(np.float16)
    # A weight that rounds to 1 is the next element. A point on an element reads it twice, not its neighbor times 0,
    # as 0 times infinity is NaN.
    exact = bool(np.all(weights == points - low) and np.all(np.float16(1) - weights == 1 - (points - low)))
    low, weights = np.where(weights == 1, low + 1, low), np.where(weights == 1, np.float16(0), weights)
    high = np.where(weights == 0, low, low + 1)
    plain = find_index_pattern(low)
    if not weights.any() and isinstance(plain, Run) and plain.step > 0:
        return AxisSampling(plain, pad=pad, exact=exact)
    start = int(low.min())
    line = AxisSampling(
        Run(start, 1, int(high.max()) - start + 1), find_index_pattern(low - start),
        find_index_pattern(high - start) if weights.any() else None,
        tuple(np.where(weights == 0, np.float16(0.5), weights).tolist()) if weights.any() else (), pad, exact)
    reasons = [find_take_obstacle(x, each) for each in (line.low, line.high) if each is not None]
    return next(filter(None, reasons), "") or line


def build_crop(mb: RewriteBuilder, x: Var, crop: Crop) -> Var:
    """Build the output of the op for one box: [1 or all images, channels, height, width]."""
    rows, columns = crop.lines
    windows = {2: rows.window, 3: columns.window}
    if crop.index is not None and x.shape[0] != 1:
        windows[0] = Run(crop.index, 1, 1)
    y = slice_runs(mb, x, windows)
    if crop.resized is not None:
        height, width, mode = crop.resized
        resized: Var = mb.resize_bilinear(x=y, target_size_height=height, target_size_width=width,
                                          sampling_mode=mode)
        return resized
    y = _interpolate_axis(mb, _interpolate_axis(mb, y, 3, columns), 2, rows)
    if any(rows.pad + columns.pad):
        y = mb.pad(x=y, pad=[0, 0, 0, 0, *rows.pad, *columns.pad], mode="constant", constant_val=np.float16(0))
    return y


def _interpolate_axis(mb: RewriteBuilder, x: Var, axis: int, line: AxisSampling) -> Var:
    """Interpolate `x` at the points of `line`.

    Columns are swapped with rows meanwhile, as joined slices of the last axis are reported to go wrong on M1 and M2.
    """
    if line.low is None:
        return x
    aside = axis == 3 and not (isinstance(line.low, Run) and isinstance(line.high, (Run, type(None))))
    if aside:
        turned: Var = mb.transpose(
            x=_interpolate_axis(mb, mb.transpose(x=x, perm=[0, 1, 3, 2]), 2, line), perm=[0, 1, 3, 2]
        )
        return turned
    y = take_indices(mb, x, axis, line.low)
    if line.high is None:
        return y
    weights = np.array(line.weights, np.float16).reshape((-1, 1) if axis == 2 else (1, -1))[None, None]
    below = mb.mul(x=y, y=_build_shared_const(mb, np.float16(1) - weights))
    mixed: Var = mb.add(x=below, y=mb.mul(x=take_indices(mb, x, axis, line.high), y=_build_shared_const(mb, weights)))
    return mixed


def _build_shared_const(mb: RewriteBuilder, array: Array) -> Var:
    made: Var = mb.once(("crop", array.shape, array.tobytes()), lambda: mb.const(val=array))
    return made
