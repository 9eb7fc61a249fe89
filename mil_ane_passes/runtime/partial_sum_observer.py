"""Bounds on the partial sums of convolutions and matrix products, observed while a program runs. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from .quirks.base import Quirk
from .quirks.mac_overflow_32768 import MacOverflow32768

__all__ = ["PartialSumObserver"]


class PartialSumObserver(Quirk):
    """Calls `seen` with (op, bound) for each op that sums products, and changes nothing.

    For each output element, the magnitudes of its products and of the bias are summed; the bound is the largest of
    these sums. No partial sum exceeds it, whatever the order of the summation. The cost is one more run of the op, on
    magnitudes.
    """

    name: ClassVar[str] = "partial sums"
    source: ClassVar[str] = ""
    op_types: ClassVar[tuple[str, ...]] = MacOverflow32768.op_types
    any_float: ClassVar[bool] = True

    def __init__(self, seen: Callable[[Any, float], None]) -> None:
        self._callback = seen

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return `outputs` unchanged."""
        from .quirks._operands import compute_sum_start
        from .quirks._partial_sums import sum_magnitudes

        (y,) = outputs
        if not y.numel():
            return outputs
        sums = sum_magnitudes(inputs, compute_sum_start(inputs, y))
        # NaN in one row says nothing about the others; no sum of magnitudes is negative.
        largest = float(sums.nan_to_num_(nan=-1.0, posinf=math.inf).max())
        if largest >= 0:
            self._callback(op, largest)
        return outputs
