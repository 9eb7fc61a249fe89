"""A softmax reads infinities as large finite numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from .base import Quirk

__all__ = ["InfiniteMask"]


class InfiniteMask(Quirk):
    """An fp16 `softmax` reads infinities and NaN as finite numbers, so a row that -inf masks entirely is uniform.

    Published by Apple: the ANE does not handle minus infinity correctly in softmax, so masks use -40000. Published by
    others: on M4 and M6 the exponent field of all ones is read as an ordinary exponent, so an infinity is 2**16 and the
    usual NaN 1.5 * 2**16; a mask of -1e9, which is minus infinity in fp16, gives NaN on the CPU and another result on
    the ANE. It is our interpretation that the softmax reads its operand this way: an entirely masked row becomes
    uniform and not NaN, and a NaN or an infinity dominates its row. A partly masked row is correct here; reports say
    that such rows differ as well, but do not say how. A float mask of `scaled_dot_product_attention` is read in the
    same way: the scores have no effect, since fp16 stores the sum of mask and score as an infinity again. Values too
    large for fp16 count as infinite in every precision.
    """

    name: ClassVar[str] = "infinite_mask"
    source: ClassVar[str] = (
        "https://github.com/apple/coreai-models (neural_engine_rules.md of the model-authoring skill); "
        "https://github.com/751K/Apple-Neural-Engine-Microarchitecture-Study-M6 (notes/numerics.md); "
        "https://github.com/cactus-compute/cactus/pull/734"
    )
    op_types: ClassVar[tuple[str, ...]] = ("softmax", "scaled_dot_product_attention")

    #: represents ±2**16 plus any score: it is so large that adding a score does not change it
    drowned_score: ClassVar[float] = 1e30

    def operands(self, op: Any, inputs: Any) -> Any:
        """Replace the softmax operand or the attention mask by the values that the faulty machine reads."""
        import torch

        from ._operands import ReplacedInputs, decode_nonfinite

        if op.op_type == "softmax":
            return ReplacedInputs(inputs, {"x": decode_nonfinite(inputs["x"])})
        mask = inputs.get("attn_mask")
        if mask is None or not mask.is_floating_point():
            return inputs
        read = decode_nonfinite(mask)
        drowned = torch.copysign(torch.full_like(mask, self.drowned_score), read)
        return ReplacedInputs(inputs, {"attn_mask": torch.where(torch.isfinite(mask.half()), mask, drowned)})
