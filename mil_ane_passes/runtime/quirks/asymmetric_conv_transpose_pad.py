"""A transposed convolution with unequal pads is shifted."""

from __future__ import annotations

from typing import Any, ClassVar

from .base import Quirk

__all__ = ["AsymmetricConvTransposePad"]


class AsymmetricConvTransposePad(Quirk):
    """An fp16 `conv_transpose` whose pads before and after an axis differ gives a shifted output.

    Published: pad [1, 0] and stride 2 on an M1 with macOS 14.3, reproduced by a maintainer; fp32 is correct. The size
    of the shift is not stated. Two choices are ours: the two pads of an axis are swapped, and every unequal pair of
    custom pads is affected.
    """

    name: ClassVar[str] = "asymmetric_conv_transpose_pad"
    source: ClassVar[str] = "https://github.com/apple/coremltools/issues/2324"
    op_types: ClassVar[tuple[str, ...]] = ("conv_transpose",)

    def operands(self, op: Any, inputs: Any) -> Any:
        """Return the inputs with the two pads of each axis swapped."""
        from ._operands import ReplacedInputs

        pad = inputs.values("pad")
        before, after = pad[::2], pad[1::2]
        if before == after or inputs.value("pad_type") != "custom":
            return inputs
        return ReplacedInputs(inputs, {"pad": [amount for pair in zip(after, before) for amount in pair]})
