"""An exponential overflows fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from .base import HALF_OVERFLOW, Quirk

__all__ = ["ExpOverflow"]


class ExpOverflow(Quirk):
    """An fp16 `exp` of more than 11.09 is infinite, and so are sums and logarithms of it.

    Published: logcumsumexp, which is converted to exp, cumsum and log, is infinite and then NaN above 11.09, where
    exp(x) exceeds 65504. The same holds for a softplus or a log-sum-exp written with `exp`. The declared dtype fp16
    already implies this, so precision float16 shows it without this quirk. The quirk also shows it at float32 and
    float64.
    """

    name: ClassVar[str] = "exp_overflow"
    source: ClassVar[str] = (
        "https://github.com/apple/coremltools/issues/2729; https://github.com/apple/coreai-torch/issues/21"
    )
    op_types: ClassVar[tuple[str, ...]] = ("exp",)

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Replace results too large for fp16 by an infinity."""
        (y,) = outputs
        return (y.masked_fill(y >= HALF_OVERFLOW, math.inf),)
