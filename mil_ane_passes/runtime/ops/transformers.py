"""Attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..numeric import tidy
from ..registry import kernel
from .activation import apply_softmax


@kernel("scaled_dot_product_attention")
def scaled_dot_product_attention(op: Any, ins: Any) -> torch.Tensor:
    query, mask = ins["query"], ins.get("attn_mask")
    scores = torch.matmul(tidy(query), tidy(ins["key"].mT)) / math.sqrt(query.shape[-1])
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(apply_softmax(scores, -1), tidy(ins["value"]))
