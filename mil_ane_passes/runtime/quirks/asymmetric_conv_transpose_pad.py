"""A transposed convolution with unequal pads is shifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from coremltools.converters.mil.mil import types

__all__ = ["AsymmetricConvTransposePad"]


class AsymmetricConvTransposePad:
    """For an fp16 `conv_transpose` whose pad before an axis differs from the one after, the output is shifted.

    Published for pad [1, 0] and stride 2 on an M1 with macOS 14.3, reproduced by a maintainer; fp32 is right. By how
    much it shifts is not stated: that the two pads change places is our choice.
    """

    name: ClassVar[str] = "asymmetric_conv_transpose_pad"
    source: ClassVar[str] = "https://github.com/apple/coremltools/issues/2324"
    op_types: ClassVar[tuple[str, ...]] = ("conv_transpose",)

    def apply(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Runs the op again with the pads of each axis swapped."""
        from ..ops.conv import add_bias, transposed

        pad = inputs.values("pad")
        equal = pad[::2] == pad[1::2]
        if equal or inputs.value("pad_type") != "custom" or inputs.var("x").dtype != types.fp16:
            return outputs
        return (add_bias(transposed(inputs, swap_pads=True), inputs.get("bias")),)
