"""A square overflows fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from .base import HALF_OVERFLOW, Quirk

__all__ = ["SquareOverflow"]


class SquareOverflow(Quirk):
    """The fp16 square of more than 256 in magnitude is infinite, so an RMSNorm written with it gives 0.

    Published: coremltools' own conversion of RMSNorm divides by the largest magnitude first, since x * x overflows on
    the ANE above 256; 256 * 256 was observed to be infinite on M4 and M6. All forms of a square are affected: `square`,
    `mul` of a value with itself, and `pow` by 2. The declared dtype fp16 already implies this, so precision float16
    shows it without this quirk. The quirk also shows it at float32 and float64. Not affected: `reduce_l2_norm` and
    `l2_norm`, which sources recommend as stable, `layer_norm`, which is used as a fix, and `reduce_sum_square`,
    `instance_norm` and `local_response_norm`, which no report mentions.
    """

    name: ClassVar[str] = "square_overflow"
    source: ClassVar[str] = (
        "https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py (rms_norm); "
        "https://github.com/751K/Apple-Neural-Engine-Microarchitecture-Study-M6 (notes/numerics.md); "
        "https://github.com/apple/coremltools/issues/2585; https://github.com/pytorch/executorch/pull/19523; "
        "https://github.com/pytorch/executorch/pull/8641"
    )
    op_types: ClassVar[tuple[str, ...]] = ("square", "mul", "pow")

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Replace squares too large for fp16 by an infinity."""
        (y,) = outputs
        return (y.masked_fill(y >= HALF_OVERFLOW, math.inf),) if self._is_square(op, inputs) else outputs

    @staticmethod
    def _is_square(op: Any, inputs: Any) -> bool:
        if op.op_type == "mul":
            return op.x is op.y
        return op.op_type == "square" or bool((inputs["y"] == 2).all())
