"""Softplus drops to zero."""

from __future__ import annotations

import math
from typing import ClassVar

from .base import Cliff

__all__ = ["SoftplusCliff"]


class SoftplusCliff(Cliff):
    """An fp16 `softplus` of more than about 10.4 is 0, and so are functions computed from it, such as mish.

    Published: from x = 10.4 on the output is 0 (M3 Max with macOS 26.3.1, M4); on an M5 softplus(10) is correct and
    softplus(11) is 0. So the cliff is below ln(65504) = 11.09, where fp16 ends. All reports agree with an overflow of 1
    + exp(x) at 2**15; it is our choice that the cliff is exactly there. Mish, x * tanh(softplus(x)), is not a separate
    op: it falls to 0 with the softplus in it (published: a mean absolute error of 2.955). `softplus_parametric` is not
    affected, since no report mentions it. A softplus written as log(1 + exp(x)) has no such op; see `exp_overflow`.
    """

    name: ClassVar[str] = "softplus_cliff"
    source: ClassVar[str] = (
        "https://github.com/apple/coremltools/issues/2687; https://github.com/apple/coremltools/issues/2359; "
        "https://github.com/apple/coremltools/pull/2618; https://github.com/apple/coremltools/pull/2725; "
        "https://github.com/sbryngelson/ANEForge/issues/113"
    )
    op_types: ClassVar[tuple[str, ...]] = ("softplus",)
    cliff: ClassVar[float] = math.log(2.0**15)
