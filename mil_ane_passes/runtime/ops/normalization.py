"""Normalizations, by the formulas in coremltools' op documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...utils.text_format import format_count
from ..numeric import canonicalize_layout
from ..registry import register_kernel
from .reduction import reduce_over


def _scale_channels(y: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None) -> torch.Tensor:
    """Compute `y * gamma + beta` in place, both optional."""
    if gamma is not None:
        y.mul_(gamma)
    return y if beta is None else y.add_(beta)


def _shape_parameters(ins: Any, x: torch.Tensor, *names: str) -> dict[str, torch.Tensor]:
    """Return the parameters in `names` that the op has, reshaped to [channels, 1, ...] to broadcast with `x`.

    Raises ValueError for a parameter that does not have one value for each channel.
    """
    found = {name: ins[name] for name in names if ins.has(name)}
    for name, value in found.items():
        if value.numel() != x.shape[1]:
            raise ValueError(f"{name} has {format_count(value.numel(), 'value')}; expected {x.shape[1]}, one for each "
                             "channel of x")
    return {name: value.reshape([-1] + [1] * (x.dim() - 2)) for name, value in found.items()}


@register_kernel("batch_norm")
def batch_norm(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    mean, deviation, gamma, beta = ins.memo((x.dim(), x.shape[1]), lambda: _shape_batch_norm(ins, x))
    return _scale_channels((x - mean).div_(deviation), gamma, beta)


def _shape_batch_norm(ins: Any, x: torch.Tensor) -> list[Any]:
    """Return mean, standard deviation, gamma and beta, each [channels, 1, ...] or None; all are constants."""
    shaped = _shape_parameters(ins, x, "mean", "variance", "gamma", "beta")
    deviation = torch.sqrt(shaped["variance"] + ins["epsilon"])
    return [shaped["mean"], deviation, shaped.get("gamma"), shaped.get("beta")]


def _normalize_over(x: torch.Tensor, axes: list[int], epsilon: torch.Tensor) -> torch.Tensor:
    """Subtract the mean over `axes` and divide by the standard deviation.

    Holds at most two more tensors of the size of `x`.
    """
    y = x - reduce_over(x, axes, _compute_mean)
    return y.div_(reduce_over(y, axes, lambda rows: _compute_mean(rows.square())).add_(epsilon).sqrt_())


def _compute_mean(rows: torch.Tensor) -> torch.Tensor:
    return rows.mean(-1)


@register_kernel("instance_norm")
def instance_norm(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    axes = list(range(2, x.dim()))
    shaped = _shape_parameters(ins, x, "gamma", "beta")
    return _scale_channels(_normalize_over(x, axes, ins["epsilon"]), shaped.get("gamma"), shaped.get("beta"))


@register_kernel("layer_norm")
def layer_norm(op: Any, ins: Any) -> torch.Tensor:
    """Normalize rows with torch's kernel; normalized axes are moved last, so their position does not change the bits.
    """
    x = ins["x"]
    order, kept, extents = ins.memo(x.shape, lambda: _order_axes(ins, x.shape))
    gamma, beta = (None if each is None else each.reshape(extents) for each in (ins.get("gamma"), ins.get("beta")))
    rows = canonicalize_layout(x.permute(order) if order else x)
    if not rows.numel():
        return x
    y = torch.layer_norm(rows, extents, gamma, beta, ins.value("epsilon"))
    return y.permute(kept) if order else y


def _order_axes(ins: Any, shape: torch.Size) -> tuple[list[int], list[int], list[int]]:
    """Return the axes with the normalized ones last, the permutation back, and the extents of the normalized ones.

    Both are empty where they are last.
    """
    rank = len(shape)
    normalized = sorted(axis % rank for axis in (ins.values("axes") if ins.has("axes") else range(rank)))
    order = [*(axis for axis in range(rank) if axis not in normalized), *normalized]
    extents = [shape[axis] for axis in normalized]
    return ([], [], extents) if order == list(range(rank)) else (
        order, [order.index(axis) for axis in range(rank)], extents)


@register_kernel("l2_norm")
def l2_norm(op: Any, ins: Any) -> torch.Tensor:
    """Normalize over the last three axes."""
    x = ins["x"]
    squares = reduce_over(x, [-3, -2, -1], lambda rows: rows.square().sum(-1))
    return x / torch.sqrt(squares + ins["epsilon"])


@register_kernel("local_response_norm")
def local_response_norm(op: Any, ins: Any) -> torch.Tensor:
    """Normalize each element by the squares of `size` neighbouring channels.

    A window of even size has one more channel before the element than after it, as in torch.
    """
    x, size = ins["x"], ins.value("size")
    channels_last = functional.pad(x.square().movedim(1, -1), (size // 2, (size - 1) // 2))
    sums = channels_last.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / torch.pow(ins["k"] + ins["alpha"] / size * sums, ins["beta"])
