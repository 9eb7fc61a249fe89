"""The bias of a 1-D transposed convolution does not reach the whole channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = ["ConvTranspose1dBias"]


class ConvTranspose1dBias:
    """For a rank-3 `conv_transpose` with a non-zero bias, the bias reaches only the first values of each channel.

    Published for `ConvTranspose1d(768, 384, 7, stride=3, padding=2)` on (1, 768, 600), target iOS18; chip and OS are
    not stated. The report says "only the first few values of each channel"; the number 8 is our choice. Rank 4 is
    reported right.
    """

    name: ClassVar[str] = "conv_transpose_1d_bias"
    source: ClassVar[str] = "https://zhaode.wang/2025/08/18/coreml-conv1d"
    op_types: ClassVar[tuple[str, ...]] = ("conv_transpose",)

    #: how many values of each output channel still get the bias
    reach: ClassVar[int] = 8

    def apply(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Runs the op again without its bias and adds the bias to the first values only."""
        from ..ops.conv import transposed

        bias = inputs.get("bias")
        if inputs["x"].dim() != 3 or bias is None or not bias.any():
            return outputs
        faulty = transposed(inputs) + 0.0
        faulty[:, :, : self.reach] += bias.view(1, -1, 1)
        return (faulty,)
