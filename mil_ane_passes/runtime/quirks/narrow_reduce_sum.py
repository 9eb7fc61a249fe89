"""A long sum is accumulated in fp16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .base import Quirk

__all__ = ["NarrowReduceSum"]


class NarrowReduceSum(Quirk):
    """An fp16 `reduce_sum` or `reduce_mean` rounds to fp16 after each addition, so a sum of ones stops at 2048.

    Published: `reduce_sum` accumulates in fp16 and a matrix product in a wider type; integer sums are exact up to 2048,
    2049 reads as 2050, and in one case 2048 as 2050. The same pages also say that all reductions accumulate in a wider
    type, and 2050 for 2049 can be just the rounding of the result, so the severity is an open question. Two choices are
    ours, and are the worst case that fits the reports: the additions go from first to last, one at a time, and a mean
    is such a sum divided by the number of elements.
    """

    name: ClassVar[str] = "narrow_reduce_sum"
    source: ClassVar[str] = (
        "https://github.com/sbryngelson/ANEForge (docs/developer/numerics.md); "
        "https://github.com/sbryngelson/ANEForge/issues/115"
    )
    op_types: ClassVar[tuple[str, ...]] = ("reduce_sum", "reduce_mean")

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the sum or mean computed with fp16 additions."""
        import torch

        (y,), x = outputs, inputs["x"]
        axes = sorted(axis % x.dim() for axis in inputs.values("axes") or range(x.dim()))
        kept = [axis for axis in range(x.dim()) if axis not in axes]
        terms = x.permute(*axes, *kept).flatten(0, len(axes) - 1).half()
        total = torch.zeros_like(terms[0])
        for term in terms:
            total = total + term
        result = total.to(y.dtype) / (len(terms) if op.op_type == "reduce_mean" else 1)
        return (result.reshape(y.shape),)
