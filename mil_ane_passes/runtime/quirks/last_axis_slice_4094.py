"""A slice from inside the last axis overflows at 4094."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from .base import Quirk

__all__ = ["LastAxisSlice4094"]


class LastAxisSlice4094(Quirk):
    """An fp16 slice that begins inside the last axis makes values above 4094 infinite.

    Published for M1, M1 Max and M2 Pro, for `slice_by_size`: such a slice is copied through a fixed-point format scaled
    by 16, so 65504 / 16 is the largest value; M4 and M5 are correct. It is our interpretation that `slice_by_index` and
    the later parts of a `split` are affected as well. A concat of such slices is also reported to return wrong
    elements. The reports do not say which elements, so this is not imitated.
    """

    name: ClassVar[str] = "last_axis_slice_4094"
    source: ClassVar[str] = (
        "https://github.com/sbryngelson/ANEForge/pull/145; https://github.com/sbryngelson/ANEForge/issues/137; "
        "https://github.com/sbryngelson/ANEForge (docs/numeric-cliffs.md)"
    )
    op_types: ClassVar[tuple[str, ...]] = ("slice_by_index", "slice_by_size", "split")

    #: the largest magnitude that is copied correctly
    largest: ClassVar[float] = 4094.0

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Replace too large values by infinities in slices that begin inside the last axis."""
        last = inputs["x"].dim() - 1
        if op.op_type == "split":
            inside = inputs.value("axis") % (last + 1) == last
            return [outputs[0], *(self._copy_through_fixed_point(part) if inside else part for part in outputs[1:])]
        if self._get_begin(op, inputs, last) == 0:
            return outputs
        return [self._copy_through_fixed_point(part) for part in outputs]

    def _get_begin(self, op: Any, inputs: Any, last: int) -> int:
        masked = op.op_type == "slice_by_index" and inputs.get("begin_mask") is not None \
            and inputs.values("begin_mask")[last]
        return 0 if masked else int(inputs.values("begin")[last])

    def _copy_through_fixed_point(self, part: Any) -> Any:
        import torch

        return torch.where(part.abs() > self.largest, torch.copysign(torch.full_like(part, math.inf), part), part)
