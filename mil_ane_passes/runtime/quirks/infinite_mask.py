"""A softmax takes infinities for large finite numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from .base import Quirk

__all__ = ["InfiniteMask"]


class InfiniteMask(Quirk):
    """An fp16 `softmax` takes infinities and NaN for finite numbers, so a row masked by -inf throughout is uniform.

    Published by Apple: the ANE does not handle minus infinity correctly in softmax, so masks use -40000; by others: on
    M4 and M6 the exponent field of all ones is read as an ordinary exponent, so an infinity is 2**16 and the usual NaN
    1.5 * 2**16; and that a mask of -1e9, which is minus infinity in fp16, gives NaN on the CPU and something else on
    the ANE. That the softmax reads its operand this way is our interpretation: a row masked throughout becomes uniform
    and not NaN, and a NaN or an infinity dominates its row. A row masked in part is correct here; reports say that such
    rows diverge as well, but not how. A float mask of `scaled_dot_product_attention` is read in the same way: the
    scores are lost beside it, since fp16 stores their sum as an infinity again. Values too large for fp16 count as
    infinite in every precision.
    """

    name: ClassVar[str] = "infinite_mask"
    source: ClassVar[str] = (
        "https://github.com/apple/coreai-models (neural_engine_rules.md of the model-authoring skill); "
        "https://github.com/751K/Apple-Neural-Engine-Microarchitecture-Study-M6 (notes/numerics.md); "
        "https://github.com/cactus-compute/cactus/pull/734"
    )
    op_types: ClassVar[tuple[str, ...]] = ("softmax", "scaled_dot_product_attention")

    #: represents ±2**16 plus any score: every score is lost beside it
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
