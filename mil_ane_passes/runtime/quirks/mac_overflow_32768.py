"""Sums of products overflow at half of fp16's range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = ["MacOverflow32768"]


class MacOverflow32768:
    """Convolutions and matrix products that reach 32768 in magnitude become infinite.

    Published for M2 Pro, M4, M5 and M6: a partial sum or a bias that reaches 32768 gives a sticky infinity. The order
    of the partial sums is not known, so only the bias and the finished sum are looked at here; the faulty machine may
    overflow where this does not.
    """

    name: ClassVar[str] = "mac_overflow_32768"
    source: ClassVar[str] = (
        "https://github.com/751K/Apple-Neural-Engine-Microarchitecture-Study-M6 (notes/numerics.md, notes/defects.md); "
        "https://github.com/sbryngelson/ANEForge (docs/numeric-cliffs.md)"
    )
    op_types: ClassVar[tuple[str, ...]] = ("conv", "conv_transpose", "linear", "matmul", "einsum")

    #: the magnitude from which on a sum is infinite
    limit: ClassVar[float] = 32768.0

    def apply(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Infinities of the same sign in place of what is too large."""
        import torch

        (y,) = outputs
        if not y.is_floating_point():
            return outputs
        over = y.abs() >= self.limit
        faulty = torch.where(over, torch.copysign(torch.full_like(y, math.inf), y), y)
        bias = inputs.get("bias") if inputs.accepts("bias") else None
        if bias is not None:
            # The bias starts the sum: once it is too large, so is its whole channel.
            channel = bias if op.op_type == "linear" else bias.reshape(-1, *(1,) * (y.dim() - 2))
            start = torch.copysign(torch.full_like(channel, math.inf), channel)
            faulty = torch.where(channel.abs() >= self.limit, start.expand_as(y), faulty)
        return (faulty,)
