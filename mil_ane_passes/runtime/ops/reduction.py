"""Reductions. The reduced axes are moved last and merged, so that their position does not change the rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..numeric import canonicalize_layout
from ..registry import register_kernel

__all__ = ["reduce_over"]


def reduce_over(
    x: torch.Tensor, axes: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor], keep_dims: bool = True
) -> torch.Tensor:
    """Reduce `axes` of `x`: they are merged into one last axis, which `function` reduces."""
    reduced = sorted(axis % x.dim() for axis in axes) if x.dim() else []
    kept = [axis for axis in range(x.dim()) if axis not in reduced]
    moved = x.permute(*kept, *reduced) if x.dim() else x
    rows = canonicalize_layout(
        moved.reshape([x.shape[axis] for axis in kept] + [math.prod(x.shape[axis] for axis in reduced)])
    )
    y = function(rows)
    return y.reshape([1 if axis in reduced else x.shape[axis] for axis in range(x.dim())]) if keep_dims else y


def _get_sum_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which to sum: integers are added in their own dtype (torch would widen them)."""
    return None if x.is_floating_point() else x.dtype


def _to_floating(x: torch.Tensor) -> torch.Tensor:
    """Convert integers to float64, for reductions without an integer result; storing the result truncates it."""
    return x if x.is_floating_point() else x.double()


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reduce_l1_norm": lambda x: x.abs().sum(-1, dtype=_get_sum_dtype(x)),
    "reduce_l2_norm": lambda x: _to_floating(x).square().sum(-1).sqrt(),
    "reduce_log_sum": lambda x: _to_floating(x).sum(-1).log(),
    "reduce_log_sum_exp": lambda x: torch.logsumexp(_to_floating(x), -1),
    "reduce_max": lambda x: x.amax(-1),
    "reduce_mean": lambda x: _to_floating(x).mean(-1),
    "reduce_min": lambda x: x.amin(-1),
    "reduce_prod": lambda x: x.prod(-1, dtype=_get_sum_dtype(x)),
    "reduce_sum": lambda x: x.sum(-1, dtype=_get_sum_dtype(x)),
    "reduce_sum_square": lambda x: x.square().sum(-1, dtype=_get_sum_dtype(x)),
}


@register_kernel(*_REDUCTIONS)
def reduce_axes(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    axes = ins.values("axes") if ins.has("axes") else range(x.dim())
    return reduce_over(x, axes, _REDUCTIONS[op.op_type], bool(ins.value("keep_dims")))


@register_kernel("reduce_argmax")
def reduce_argmax(op: Any, ins: Any) -> torch.Tensor:
    return torch.argmax(ins["x"], dim=ins.value("axis"), keepdim=bool(ins.value("keep_dims")))


@register_kernel("reduce_argmin")
def reduce_argmin(op: Any, ins: Any) -> torch.Tensor:
    return torch.argmin(ins["x"], dim=ins.value("axis"), keepdim=bool(ins.value("keep_dims")))
