"""Crop constant boxes by slices, and resize those."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_const, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study, cite_private_quirk
from ...passes.examples import build_program
from ...rules.crop_resize import CropResize
from ._crop_boxes import build_crop, plan_crops

_BOX_INPUTS = ("boxes", "box_indices", "roi")


class CropResizeBySlices(Rewrite):
    """Cut the constant boxes of a crop_resize out by slices, resize those, and join them.

    why     Core ML on an M4 rejects crop_resize, and it runs on no GPU either. Slices and resize_bilinear are taken.
    when    crop_resize of fp16 values with constant boxes in an image of known height and width. Points that lie on
            elements, evenly apart: one slice. A box whose corners are elements of the image: a slice and a
            resize_bilinear. Any other box: the elements below and above each point are joined and mixed with constant
            weights, width first. Points outside of the image are padded where the op fills with zeros.
    exact   rounding. The points are computed in double precision by the documented formulas, which are those of
            resize_bilinear. Only slices: the same bits. A point on an element takes half of it twice, so that an
            infinite neighbour leaves it alone; that loses at most 2^-24, of subnormal numbers. Weights that fp16 does
            not hold are rounded, which moves results by at most 2^-10 of the largest element. A point within 2^-12 of
            an element may so become the element: what is infinite or NaN beside it then does not reach it.
    cost    For each box a slice and a resize; other boxes: as many slices as there are runs of neighbours, two
            products and a sum for each axis, and two transposes. `max_parts` in all.

    before
        %y: fp16[1, 2, 4, 4] = crop_resize(x=%x, boxes=[[1.0, 2.0, 4.0, 6.0]], target_height=4, target_width=4, sampling_mode=ALIGN_CORNERS)
    after
        %0: fp16[1, 2, 4, 5] = slice_by_index(x=%x, begin=[0, 0, 1, 2], end=[0, 0, 5, 7], begin_mask=[True, True, False, False], end_mask=[True, True, False, False])
        %y: fp16[1, 2, 4, 4] = resize_bilinear(x=%0, target_size_height=4, target_size_width=4, sampling_mode=ALIGN_CORNERS)
    """  # noqa: E501

    fixes = (CropResize,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = ("as resize_bilinear where corners are elements (measured 9e-4 of 2.7, as the op's own); elsewhere half a "
             "unit in the last place for each weight, product and sum: measured 2.0e-3 of 2.7 against 8.7e-4 of the op")
    moves = 2.0**-10
    moves_of = "operands"
    preset = "full"
    roots = ("crop_resize",)
    evidence = (
        cite_m4_study("crop_resize is unsupported, and runs on no GPU either; resize and slices are accepted"),
        cite_private_quirk(
            "slices of the last axis that are joined return wrong elements on the M1 and M2 generations; "
            "transposing the axis away and back is right on all"
        ),
    )

    max_parts: int = 64
    "The most slices for all boxes together."

    def match(self, op: Operation) -> Hit | Miss:
        computed = [name for name in _BOX_INPUTS if op.inputs.get(name) is not None and not is_const(op.inputs[name])]
        if computed:
            return Miss(op, f"its {computed[0]} are computed when the model runs")
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if any(map(is_symbolic, op.x.shape[2:])):
            return Miss(op, "an image whose height or width is known only at run time")
        crops = plan_crops(op)
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
        made = {crop: build_crop(mb, hit.op.x, crop) for crop in dict.fromkeys(hit.crops)}
        values = [made[crop] for crop in hit.crops]
        if hit.op.outputs[0].rank == hit.op.x.rank:
            joined: Var = values[0] if len(values) == 1 else mb.concat(values=values, axis=0)
            return joined
        stacked: Var = mb.expand_dims(x=values[0], axes=[0]) if len(values) == 1 else mb.stack(values=values, axis=0)
        return stacked

    def examples(self) -> Iterable[Example]:
        yield Example("corners on elements", lambda: _build_crop([[1, 2, 4, 6]]))
        yield Example("patches", lambda: _build_crop([[0, 0, 3, 3], [2, 2, 5, 5], [0, 0, 3, 3]]))
        yield Example("two images, backwards", lambda: _build_crop(
            [[4, 0, 0.5, 3], [1, 5.25, 3, 2]], indices=[1, 0], shape=(2, 2, 6, 7)))
        yield Example("between elements", lambda: _build_crop(
            [[0.296875, 0.203125, 0.8984375, 0.703125]], normalized_coordinates=True, sampling_mode="OFFSET_CORNERS"))
        yield Example("leaves the image", lambda: _build_crop([[-1, 0.5, 4, 9]]))
        yield Example("all images, iOS15", lambda: _build_roi_crop([[0, 0, 4, 4], [1, 1.5, 3, 3]]))
        yield Example(
            "by index, iOS16", lambda: _build_roi_crop([[0, 1, 1, 4, 4]], shape=(1, 2, 6, 6), opset=ct.target.iOS16)
        )
        yield Example("leaves the image, filled with 1", lambda: _build_crop([[-1, 0, 4, 4]], pad_value=np.float16(1)),
                      reason="a box that leaves the image, filled with 1: only zeros are padded")
        yield Example("outside", lambda: _build_crop([[-4, 0, -2, 4]]),
                      reason="a box whose points are all outside of the image")
        yield Example("NaN", lambda: _build_crop([[0, 0, np.nan, 4]]), reason="a box with an infinite or NaN corner")
        yield Example("many", lambda: _build_crop([[0, 0, at, 4] for at in range(1, 6)] * 2, shape=(1, 2, 6, 7)),
                      options={"max_parts": 4}, reason="5 slices for 10 boxes, max_parts=4")
        yield Example("symbolic", lambda: _build_crop([[0, 0, 2, 2]], shape=(1, 2, None, 7)),
                      reason="an image whose height or width is known only at run time")
        yield Example("by index of two images", lambda: _build_roi_crop([[0, 1, 1, 4, 4]], shape=(2, 2, 6, 6)), reason=(
            "one image for each box, of 2: its shape is documented with one image and inferred with all"))
        yield Example("computed", lambda: build_program(lambda x, boxes: Builder.crop_resize(
            x=x, boxes=boxes, box_indices=np.zeros(2, np.int32), target_height=2, target_width=2, name="y"),
            x=(1, 2, 6, 7), boxes=(2, 4)), reason="its boxes are computed when the model runs")
        yield Example("fp32", lambda: _build_crop([[0, 0, 2, 2]], dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)


def _build_crop(
    boxes: Any, indices: Any = None, shape: Any = (1, 2, 6, 7), dtype: Any = types.fp16, **how: Any
) -> Program:
    size = {"target_height": 4, "target_width": 4, "sampling_mode": "ALIGN_CORNERS"} | how
    return build_program(lambda x: Builder.crop_resize(
        x=x, boxes=np.array(boxes, np.float32), box_indices=np.array(indices or [0] * len(boxes), np.int32), name="y",
        **size), dtype=dtype, x=shape)


def _build_roi_crop(boxes: Any, shape: Any = (2, 2, 6, 6), opset: Any = ct.target.iOS15) -> Program:
    roi = np.array(boxes, np.float16)
    return build_program(lambda x: Builder.crop_resize(
        x=x, roi=roi.reshape(len(roi), 1, -1, 1, 1), target_height=3, target_width=4, name="y"), opset=opset, x=shape)
