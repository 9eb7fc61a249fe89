"""Crop constant boxes by slices, and resize those."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler_quirk, cite_m4_study
from ...passes.examples import make_example
from ...rules.unsupported_ops import CropResize
from ..indexing._index_patterns import (
    IndexPattern,
    Run,
    find_index_pattern,
    find_take_obstacle,
    slice_runs,
    take_indices,
)

_BOX_INPUTS = ("boxes", "box_indices", "roi")
_Array = np.ndarray[Any, Any]


class CropResizeBySlices(Rewrite):
    """Replace a crop_resize with constant boxes by slices, resizes and a concat.

    why     Core ML on an M4 rejects crop_resize, on the GPU, too. Slices and resize_bilinear are supported.
    when    crop_resize of fp16 values with constant boxes in an image of static height and width. Evenly spaced points
            on elements: one slice. A box whose corners are elements of the image: a slice and a resize_bilinear. Other
            boxes: the elements below and above each point are gathered by slices and blended with constant weights,
            width first. Points outside the image are padded if the op fills with zeros.
    exact   rounding. The points are computed in double precision by the documented formulas, which are those of
            resize_bilinear. Only slices: the same bits. A point exactly on an element is the sum of two halves of this
            element, so that an infinite neighbour does not affect it; for subnormal numbers this loses at most 2^-24.
            Weights that fp16 does not represent are rounded, which moves results by at most 2^-10 of the largest
            element. A point within 2^-12 of an element may be rounded to this element: an infinite or NaN neighbour
            then no longer affects it.
    cost    For each box a slice and a resize; other boxes: as many slices as there are runs of neighbours, two products
            and a sum for each axis, and two transposes. At most `max_parts` slices for all boxes.

    before
        %y: fp16[1, 2, 4, 4] = crop_resize(x=%x, boxes=[[1.0, 2.0, 4.0, 6.0]], target_height=4, target_width=4, sampling_mode=ALIGN_CORNERS)
    after
        %0: fp16[1, 2, 4, 5] = slice_by_index(x=%x, begin=[0, 0, 1, 2], end=[0, 0, 5, 7], begin_mask=[True, True, False, False], end_mask=[True, True, False, False])
        %y: fp16[1, 2, 4, 4] = resize_bilinear(x=%0, target_size_height=4, target_size_width=4, sampling_mode=ALIGN_CORNERS)
    """  # noqa: E501

    fixes = (CropResize,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = ("that of resize_bilinear if corners are elements (measured: 9e-4 for results up to 2.7, as before); "
             "otherwise half a unit in the last place for each weight, product and sum (measured: 2.0e-3 for results "
             "up to 2.7, 8.7e-4 for crop_resize)")
    moves = 2.0**-10
    moves_of = "operands"
    preset = "full"
    roots = ("crop_resize",)
    evidence = (
        cite_m4_study("crop_resize is unsupported, on the GPU, too; resize and slices are accepted"),
        cite_ane_compiler_quirk(
            "slices of the last axis that are joined return wrong elements on the M1 and M2 generations; "
            "transposing the axis away and back is correct on all"
        ),
    )

    max_parts: int = 64
    "Maximum number of slices for all boxes."

    def match(self, op: Operation) -> Hit | Miss:
        for name in _BOX_INPUTS:
            if op.inputs.get(name) is not None and not is_const(op.inputs[name]):
                return Miss(op, f"its {name} are computed at run time")
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if any(map(is_symbolic, op.x.shape[2:])):
            return Miss(op, "an image whose height or width is dynamic")
        crops = _plan_crops(op)
        if isinstance(crops, str):
            return Miss(op, crops)
        parts = sum(crop.parts for crop in dict.fromkeys(crops))
        if parts > self.max_parts:
            return Miss(op, f"{parts} slices for {len(crops)} boxes, max_parts={self.max_parts}")
        bitwise = all(crop.is_bitwise and crop.exact for crop in crops)
        return Hit(op, note=f"{len(crops)} constant boxes by {parts} slices", crops=crops,
                   exactness=Exactness.BITWISE if bitwise else None,
                   moves=0.0 if all(crop.exact for crop in crops) else self.moves)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        built = {crop: _build_crop(mb, hit.op.x, crop) for crop in dict.fromkeys(hit.crops)}
        values = [built[crop] for crop in hit.crops]
        has_box_axis = hit.op.outputs[0].rank > hit.op.x.rank
        if len(values) == 1:
            return mb.expand_dims(x=values[0], axes=[0]) if has_box_axis else values[0]
        joined: Var = mb.stack(values=values, axis=0) if has_box_axis else mb.concat(values=values, axis=0)
        return joined

    def examples(self) -> Iterable[Example]:
        crop, crop_roi = _make_crop_example, _make_roi_example
        yield crop("corners on elements", [[1, 2, 4, 6]])
        yield crop("patches", [[0, 0, 3, 3], [2, 2, 5, 5], [0, 0, 3, 3]])
        yield crop("two images, backwards", [[4, 0, 0.5, 3], [1, 5.25, 3, 2]], indices=[1, 0], x=(2, 2, 6, 7))
        yield crop("between elements", [[0.296875, 0.203125, 0.8984375, 0.703125]], normalized_coordinates=True,
                   sampling_mode="OFFSET_CORNERS")
        yield crop("leaves the image", [[-1, 0.5, 4, 9]])
        yield crop_roi("all images, iOS15", [[0, 0, 4, 4], [1, 1.5, 3, 3]])
        yield crop_roi("by index, iOS16", [[0, 1, 1, 4, 4]], x=(1, 2, 6, 6), opset=ct.target.iOS16)
        yield crop("leaves the image, filled with 1", [[-1, 0, 4, 4]], pad_value=np.float16(1),
                   reason="a box that leaves the image, filled with 1: only zeros are padded")
        yield crop("outside", [[-4, 0, -2, 4]], reason="a box whose points are all outside of the image")
        yield crop("NaN", [[0, 0, np.nan, 4]], reason="a box with an infinite or NaN corner")
        yield crop("many", [[0, 0, at, 4] for at in range(1, 6)] * 2, options={"max_parts": 4},
                   reason="5 slices for 10 boxes, max_parts=4")
        yield crop("symbolic", [[0, 0, 2, 2]], x=(1, 2, None, 7),
                   reason="an image whose height or width is dynamic")
        yield crop_roi("by index of two images", [[0, 1, 1, 4, 4]], reason=(
            "one image for each box, of 2: its shape is documented with one image and inferred with all"))
        yield make_example("computed", lambda x, boxes: Builder.crop_resize(
            x=x, boxes=boxes, box_indices=np.zeros(2, np.int32), target_height=2, target_width=2, name="y"),
            reason="its boxes are computed at run time", x=(1, 2, 6, 7), boxes=(2, 4))
        yield crop("fp32", [[0, 0, 2, 2]], dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)


def _plan_crops(op: Operation) -> list[_Crop] | str:
    """Plan the crop of each box, or return why one cannot be computed."""
    boxes = np.asarray((op.inputs.get("boxes") or op.inputs["roi"]).val).astype(np.float64)
    boxes = boxes.reshape(boxes.shape[0], -1 if boxes.size else 4)
    if not len(boxes):
        return "no box at all"
    if not np.isfinite(boxes).all():
        return "a box with an infinite or NaN corner"
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


@dataclass(frozen=True)
class _Crop:
    """A box of the image `index` (None: of all images); `resized` where a slice and a resize_bilinear compute it."""

    index: int | None
    lines: tuple[_AxisSampling, _AxisSampling]
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


@dataclass(frozen=True)
class _AxisSampling:
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


def _read_image_indices(op: Operation, boxes: _Array) -> Sequence[int | None] | str:
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


def _plan_crop(op: Operation, index: int | None, corners: _Array) -> _Crop | str:
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
        rows, columns = (_AxisSampling(Run(int(first), 1, int(last - first) + 1)) for first, last in ends)
        return _Crop(index, (rows, columns), (*sizes, mode))
    return _Crop(index, (lines[0], lines[1]))


def _compute_box_ends(op: Operation, corners: _Array, extents: list[int]) -> list[tuple[float, float]]:
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


def _plan_axis_sampling(x: Var, points: _Array, extent: int) -> _AxisSampling | str:
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
        return _AxisSampling(plain, pad=pad, exact=exact)
    start = int(low.min())
    window = Run(start, 1, int(high.max()) - start + 1)
    line = _AxisSampling(window, find_index_pattern(low - start), pad=pad, exact=exact)
    if weights.any():
        mixed = tuple(np.where(weights == 0, np.float16(0.5), weights).tolist())
        line = replace(line, high=find_index_pattern(high - start), weights=mixed)
    obstacles = [find_take_obstacle(x, each) for each in (line.low, line.high) if each is not None]
    return next(filter(None, obstacles), line)


def _compute_sample_points(first: float, last: float, count: int, mode: str) -> _Array:
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
    points: _Array = first + np.sign(last - first) * np.minimum(np.maximum(steps, 0.0), length)
    return points


def _build_crop(mb: RewriteBuilder, x: Var, crop: _Crop) -> Var:
    """Build the output of the op for one box: [1 or all images, channels, height, width]."""
    rows, columns = crop.lines
    windows = {2: rows.window, 3: columns.window}
    if crop.index is not None and x.shape[0] != 1:
        windows[0] = Run(crop.index, 1, 1)
    y = slice_runs(mb, x, windows)
    if crop.resized is not None:
        height, width, mode = crop.resized
        resized: Var = mb.resize_bilinear(x=y, target_size_height=height, target_size_width=width, sampling_mode=mode)
        return resized
    y = _interpolate_axis(mb, _interpolate_axis(mb, y, 3, columns), 2, rows)
    if any(rows.pad + columns.pad):
        y = mb.pad(x=y, pad=[0, 0, 0, 0, *rows.pad, *columns.pad], mode="constant", constant_val=np.float16(0))
    return y


def _interpolate_axis(mb: RewriteBuilder, x: Var, axis: int, line: _AxisSampling) -> Var:
    """Interpolate `x` at the points of `line`.

    Columns are swapped with rows meanwhile, as joined slices of the last axis are reported to go wrong on M1 and M2.
    """
    if line.low is None:
        return x
    is_joined = not (isinstance(line.low, Run) and (line.high is None or isinstance(line.high, Run)))
    if axis == 3 and is_joined:
        swapped = _interpolate_axis(mb, mb.transpose(x=x, perm=[0, 1, 3, 2]), 2, line)
        back: Var = mb.transpose(x=swapped, perm=[0, 1, 3, 2])
        return back
    y = take_indices(mb, x, axis, line.low)
    if line.high is None:
        return y
    weights = np.array(line.weights, np.float16).reshape((-1, 1) if axis == 2 else (1, -1))[None, None]
    below = mb.mul(x=y, y=_build_shared_const(mb, np.float16(1) - weights))
    above = mb.mul(x=take_indices(mb, x, axis, line.high), y=_build_shared_const(mb, weights))
    mixed: Var = mb.add(x=below, y=above)
    return mixed


def _build_shared_const(mb: RewriteBuilder, array: _Array) -> Var:
    made: Var = mb.once(("crop", array.shape, array.tobytes()), lambda: mb.const(val=array))
    return made


def _make_crop_example(
    name: str,
    boxes: Any,
    *,
    indices: list[int] | None = None,
    x: tuple[int | None, ...] = (1, 2, 6, 7),
    dtype: Any = types.fp16,
    reason: str | None = None,
    options: dict[str, Any] | None = None,
    **parameters: Any,
) -> Example:
    """Make an example of crops to 4x4, by default of image 0 and with aligned corners."""
    parameters = {"target_height": 4, "target_width": 4, "sampling_mode": "ALIGN_CORNERS"} | parameters

    def build_body(x: Var) -> Var:
        images = np.array(indices or [0] * len(boxes), np.int32)
        built: Var = Builder.crop_resize(x=x, boxes=np.array(boxes, np.float32), box_indices=images, name="y",
                                         **parameters)
        return built

    return make_example(name, build_body, reason=reason, options=options, dtype=dtype, x=x)


def _make_roi_example(
    name: str,
    boxes: Any,
    *,
    x: tuple[int | None, ...] = (2, 2, 6, 6),
    opset: Any = ct.target.iOS15,
    reason: str | None = None,
) -> Example:
    """Make an example of crops to 3x4 in the form of iOS15 and iOS16, whose boxes are `roi`."""
    roi = np.array(boxes, np.float16).reshape(len(boxes), 1, -1, 1, 1)

    def build_body(x: Var) -> Var:
        built: Var = Builder.crop_resize(x=x, roi=roi, target_height=3, target_width=4, name="y")
        return built

    return make_example(name, build_body, reason=reason, opset=opset, x=x)
