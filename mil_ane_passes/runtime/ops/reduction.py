"""Reductions. The reduced axes are moved last and merged, so that their position does not change the rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..numeric import canonicalize_layout
from ..registry import register_kernel

__all__ = ["reduce_over"]


def reduce_over(
    x: torch.Tensor, axes: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor], keep_dims: bool = True
) -> torch.Tensor:
    """Reduce `axes` of `x`: they are merged into one last axis, which `function` reduces."""
    order, merged, whole = _plan_reduction(x.shape, tuple(axes))
    moved = x.permute(order) if order else x
    y = function(canonicalize_layout(moved.reshape(merged)))
    return y.reshape(whole) if keep_dims else y


@lru_cache(4096)
def _plan_reduction(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
    """Return the order that moves `axes` last, empty if they are; the shape with them merged; and with them 1."""
    rank = len(shape)
    reduced = sorted(axis % rank for axis in axes) if rank else []
    order = [*(axis for axis in range(rank) if axis not in reduced), *reduced]
    merged = [shape[axis] for axis in order[: rank - len(reduced)]] + [math.prod(shape[axis] for axis in reduced)]
    return ([] if order == list(range(rank)) else order, merged,
            [1 if axis in reduced else extent for axis, extent in enumerate(shape)])


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
