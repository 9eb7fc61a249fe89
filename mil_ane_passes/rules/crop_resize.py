"""Find crop_resize."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import make_example
from ..passes.targets import Gate
from ._unsupported_ops import M4, is_any_admitted, make_unsupported_hit


class CropResize(Rule):
    """crop_resize is unsupported on the ANE.

    why     Core ML on an M4 rejects it, and it runs on no GPU either. The hardware has it from M2 on (asked without
            Core ML), not on an M1.
    when    Any crop_resize, with constant or computed boxes.
    fix     Constant boxes: a slice_by_index and a resize_bilinear for each where the corners are elements, else slices
            that are mixed with constant weights, and a concat. Computed boxes: crop outside, or use resample with
            coordinates that are an input.
    """

    code, slug = "ANE216", "crop-resize"
    roots = ("crop_resize",)
    refuses, confidence = True, "high"
    advice = "Slice and resize each constant box; crop outside, or resample by coordinates, where boxes are computed."
    evidence = (
        cite_m4_study(
            "crop_resize is unsupported, and runs on no GPU either; resize, resample and affine are accepted"
        ),
        cite_private_route("crop_resize is not there on M1; the hardware has it from M2 on"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        known = is_any_admitted(Gate(last="m1"), tuple(self.generations))
        return make_unsupported_hit(
            self, op, "crop_resize is unsupported on the ANE", seen=Gate(last="m1") if known else M4
        )

    def examples(self) -> Iterable[Example]:
        yield make_example("one box", _build_crop_resize, x=(1, 3, 8, 8))
        yield make_example(
            "slice and resize",
            lambda x: Builder.resize_bilinear(
                x=Builder.slice_by_size(x=x, begin=[0, 0, 1, 1], size=[1, 3, 4, 4]),
                target_size_height=2,
                target_size_width=2,
                name="y",
            ),
            reason="",
            x=(1, 3, 8, 8),
        )


def _build_crop_resize(x: Var) -> Var:
    result: Var = Builder.crop_resize(
        x=x, boxes=np.array([[0, 0, 4, 4]], np.float16), box_indices=np.zeros(1, np.int32), target_height=2,
        target_width=2, box_coordinate_mode="CORNERS_HEIGHT_FIRST", name="y")
    return result
