"""Attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..numeric import canonicalize_layout
from ..registry import register_kernel

__all__ = ["attend_in_parts"]

#: scores that are computed at once: 1 MB of float32, or a quarter of the result if that is more
_MAX_SCORES_AT_ONCE = 1 << 18


@register_kernel("scaled_dot_product_attention")
def scaled_dot_product_attention(op: Any, ins: Any) -> torch.Tensor:
    query, key, value, mask = ins["query"], ins["key"], ins["value"], ins.get("attn_mask")
    if mask is None and _has_fused_kernel(query, key, value):
        heads = [each.flatten(0, -3)[None] for each in (query, key, value)]
        fused = torch.nn.functional.scaled_dot_product_attention(*heads)
        return fused.reshape(*query.shape[:-1], value.shape[-1])
    operands = [query, key, value] if mask is None else [query, key, value, mask]
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in operands))
    shape = (*batch, query.shape[-2], value.shape[-1])
    room = max(math.prod(shape) // 4, _MAX_SCORES_AT_ONCE)
    if math.prod(batch) * query.shape[-2] * key.shape[-2] <= room:
        return _compute_attention(query, key, value, mask)
    y = query.new_empty(shape)
    key = canonicalize_layout(key.mT).mT  # turned once, not for each part
    attend_in_parts(query, key, value, operands[3:], y, room,
                    lambda query, key, value, masks: _compute_attention(query, key, value, masks[0] if masks else None))
    return y


def _has_fused_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether torch's fused kernel computes this attention, and answers what the ops one by one do.

    It takes float32 of one head size, and answers zeros where the scores of a row are not finite, so these are bounded.
    """
    if query.dtype != torch.float32 or query.dim() < 3 or 0 in (*query.shape, *key.shape):
        return False
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2] or not query.shape[-1] == value.shape[-1]:
        return False
    largest = float(query.abs().max()) * float(key.abs().max()) * query.shape[-1]
    return bool(largest < torch.finfo(query.dtype).max)  # not so if it is NaN


def attend_in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Sequence[torch.Tensor], y: torch.Tensor,
    room: int, compute: Callable[..., torch.Tensor],
) -> None:
    """Fill `y` part by part, along its leading axes first; at most `room` scores are in memory at once.

    `compute` returns a part, from the parts of query, key, value and of the `masks`, which are broadcast to the scores.
    """
    total = math.prod(y.shape[:-1]) * key.shape[-2]
    axis = next((each for each in range(-y.dim(), -1) if y.shape[each] > 1), None)
    if total <= room or axis is None:
        y.copy_(compute(query, key, value, masks))
        return
    step = max(1, y.shape[axis] * room // total)
    for start in range(0, y.shape[axis], step):
        query_part, y_part, *mask_parts = (_narrow_part(each, axis, start, step) for each in (query, y, *masks))
        # Each row of the query attends to all of key and value.
        key_part, value_part = (each if axis == -2 else _narrow_part(each, axis, start, step) for each in (key, value))
        attend_in_parts(query_part, key_part, value_part, mask_parts, y_part, room, compute)


def _narrow_part(x: torch.Tensor, axis: int, start: int, step: int) -> torch.Tensor:
    """Select `step` elements of `x`, starting at `start`, on an axis counted from the last.

    If `x` is broadcast along that axis, all of `x` is returned.
    """
    if x.dim() < -axis or x.shape[axis] == 1:
        return x
    return x.narrow(axis, start, min(step, x.shape[axis] - start))


def _compute_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    scores = torch.matmul(canonicalize_layout(query), canonicalize_layout(key.mT)).div_(math.sqrt(query.shape[-1]))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    torch.softmax(scores, -1, out=scores)
    return torch.matmul(scores, canonicalize_layout(value))
