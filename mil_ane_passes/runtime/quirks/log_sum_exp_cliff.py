"""A log-sum-exp drops to zero."""

from __future__ import annotations

import math
from typing import ClassVar

from .base import HALF_OVERFLOW, Cliff

__all__ = ["LogSumExpCliff"]


class LogSumExpCliff(Cliff):
    """An fp16 `reduce_log_sum_exp` whose sum of exponentials overflows fp16 is 0.

    Published: over 32 equal channels the output falls from 11.10 to 0 at x = 7.63, which is ln(65504 / 32); over x
    and a zero at 11.098, which is ln(65504 / 1). So the sum is computed without subtracting the maximum first.
    Published for reductions of the channel axis and of a stacked axis; it is our choice that every axis is affected.
    """

    name: ClassVar[str] = "log_sum_exp_cliff"
    source: ClassVar[str] = (
        "https://github.com/apple/coremltools/issues/2690; https://github.com/apple/coremltools/pull/2726"
    )
    op_types: ClassVar[tuple[str, ...]] = ("reduce_log_sum_exp",)
    cliff: ClassVar[float] = math.log(HALF_OVERFLOW)
