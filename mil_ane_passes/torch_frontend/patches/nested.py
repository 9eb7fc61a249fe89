"""Nested tensors, into which `nn.TransformerEncoder` packs padded inputs on its fast path: an error with a workaround.

The slow path gives the same values except for padding. (On the fast path, padding results in zeros.)
"""

from __future__ import annotations

from typing import Any

from ..contract import Patch
from ..errors import NotConverted

PATCH = Patch(
    code="TORCH126",
    title="nested tensors (`nn.TransformerEncoder` with a padding mask) fail without advice",
    upstream=("https://github.com/apple/coremltools/issues/1777",),
)


@PATCH.op("_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned", "nested_to_padded_tensor")
def refuse_nested_tensor(context: Any, node: Any) -> None:
    """Raise NotConverted: Core ML has only rectangular tensors."""
    raise NotConverted.at(node, "needs a nested tensor, which Core ML does not support",
                          "trace under torch.backends.mha.set_fastpath_enabled(False), or make the encoder with "
                          "enable_nested_tensor=False")
