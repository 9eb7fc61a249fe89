"""Sums of products overflow at half of fp16's range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .base import Quirk

__all__ = ["MacOverflow32768"]


class MacOverflow32768(Quirk):
    """An fp16 convolution or matrix product is infinite once a partial sum of it reaches 32768 in magnitude.

    Published: for M4 and M6, the bias is the first term of the sum. Once a partial sum reaches 32768, the result is
    infinite, even if later products bring the sum back; the limit does not depend on the weights. For M2 Pro and M5,
    matrix products above about 32752 are infinite. The order of the products is not published. Our choice is the
    contracted axis from first to last; for convolutions, the input channels, and within a channel the elements of the
    input from first to last. The infinity has the sign of the first partial sum that is too large. Sums are computed in
    float64 from the unrounded operands. It is also published that the accumulator counts in steps of 2**-16 and drops
    the smallest products; this is not imitated. A NaN operand gives NaN. Not affected: 8-bit products, whose
    accumulator is different, and `scaled_dot_product_attention`, because it is not known whether its scale is applied
    before or after the product.
    """

    name: ClassVar[str] = "mac_overflow_32768"
    source: ClassVar[str] = (
        "https://github.com/751K/Apple-Neural-Engine-Microarchitecture-Study-M6 (notes/numerics.md, notes/defects.md); "
        "https://github.com/sbryngelson/ANEForge (docs/numeric-cliffs.md); "
        "https://github.com/sbryngelson/ANEForge/issues/115"
    )
    op_types: ClassVar[tuple[str, ...]] = ("conv", "conv_transpose", "linear", "matmul", "einsum")
    last: ClassVar[bool] = True

    #: the smallest magnitude of a partial sum that makes the result infinite
    limit: ClassVar[float] = 32768.0

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Replace results by infinities if a partial sum is too large."""
        from ._partial_sums import insert_overflows

        (y,) = outputs
        return (insert_overflows(y, inputs, self.limit),)
