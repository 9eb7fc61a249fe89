"""The bias of a 1-D transposed convolution does not reach the whole channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .base import Quirk

__all__ = ["ConvTranspose1dBias"]


class ConvTranspose1dBias(Quirk):
    """The bias of a rank-3 `conv_transpose` reaches only the first values of each channel.

    Published: `ConvTranspose1d(768, 384, 7, stride=3, padding=2)` on (1, 768, 600), target iOS18. A layer of another
    size was correct, and so is rank 4. Chip, OS and the affected sizes are not stated; it is our choice that all sizes
    are affected. The report says "only the first few values of each channel"; the number 8 is our choice. The report
    does not state a dtype, so ops declared fp32 are affected as well.
    """

    name: ClassVar[str] = "conv_transpose_1d_bias"
    source: ClassVar[str] = "https://zhaode.wang/2025/08/18/coreml-conv1d"
    op_types: ClassVar[tuple[str, ...]] = ("conv_transpose",)
    any_float: ClassVar[bool] = True

    #: the number of values of each output channel to which the bias is added
    reach: ClassVar[int] = 8

    def operands(self, op: Any, inputs: Any) -> Any:
        """Return the inputs without the bias, and with the part of the bias that is applied as `ARRIVING_BIAS`."""
        from ._operands import ARRIVING_BIAS, ReplacedInputs

        bias = inputs.get("bias")
        if bias is None or inputs["x"].dim() != 3 or not bias.any():
            return inputs
        return ReplacedInputs(inputs, {"bias": None, ARRIVING_BIAS: bias.reshape(1, -1, 1).expand(-1, -1, self.reach)})

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the result with the bias added to the first values."""
        from ._operands import ARRIVING_BIAS, compute_sum_start

        (y,) = outputs
        return outputs if inputs.get(ARRIVING_BIAS) is None else (y + compute_sum_start(inputs, y),)
