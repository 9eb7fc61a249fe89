"""The logarithm of a softmax is minus infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from .base import Quirk

__all__ = ["LogSoftmaxUnderflow"]


class LogSoftmaxUnderflow(Quirk):
    """Small probabilities of an fp16 `softmax` are 0, and the `log` of 0 is minus infinity.

    Published: log_softmax, which is converted to these two ops, gives minus infinity for every class but the dominant
    one when its logit is 50 and the others are 0; the reported cause is that probabilities below about 6e-5 are lost.
    The limit here is 2**-14, the smallest normal fp16 number. Others observed that additions and products on M4 and M6
    keep smaller numbers (https://github.com/751K/Apple-Neural-Engine-Microarchitecture-Study-M6, notes/numerics.md), so
    the true limit may be lower, 2**-25. `log` adds an epsilon, 1e-45 by default. It is our interpretation of the minus
    infinity that an epsilon too small for fp16 has no effect.
    """

    name: ClassVar[str] = "log_softmax_underflow"
    source: ClassVar[str] = "https://github.com/apple/coremltools/issues/2728"
    op_types: ClassVar[tuple[str, ...]] = ("softmax", "log")

    #: smaller probabilities are lost
    smallest: ClassVar[float] = 2.0**-14

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Replace small probabilities by zero, and the logarithm of values that are zero in fp16 by minus infinity."""
        (y,) = outputs
        if op.op_type == "softmax":
            return (y.masked_fill(y < self.smallest, 0.0),)
        nothing = (inputs["x"].half() == 0) & (inputs["epsilon"].half() == 0)
        return (y.masked_fill(nothing, -math.inf),)
