"""Poolings: the input is padded explicitly to exactly the existing windows, then pooled without padding.

Only for a maximum, explicit and implicit padding give the same result, so torch's own padding is used if it can be.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from ..registry import register_kernel
from .conv import compute_pads


class _PoolWindows:
    """The positions of the windows of a pooling on each spatial axis."""

    def __init__(self, ins: Any, shape: torch.Size) -> None:
        self.sizes: list[int] = ins.values("kernel_sizes")
        self.strides: list[int] = ins.values("strides")
        self.extents: list[int] = list(shape[2:])
        self.pads: list[tuple[int, int]] = compute_pads(ins, self.extents, self.sizes, self.strides)
        ceil = bool(ins.value("ceil_mode"))
        self.counts = [self._count(axis, ceil) for axis in range(len(self.sizes))]
        self.can_use_torch_padding = self._can_use_torch_padding()

    def _count(self, axis: int, ceil: bool) -> int:
        before, after = self.pads[axis]
        stride, extent = self.strides[axis], self.extents[axis]
        free = extent + before + after - self.sizes[axis]
        count: int = free // stride + 1
        if not ceil:
            return count
        count = -(-free // stride) + 1
        # A window that would start in the padding after the end of the input is dropped.
        if (count - 1) * stride >= extent + before and before + after > 0:
            count -= 1
        return count

    def padded(self, x: torch.Tensor, value: float) -> torch.Tensor:
        """Pad (or crop) `x` to end with the last window."""
        flat: list[int] = []
        for axis in reversed(range(len(self.sizes))):
            before = self.pads[axis][0]
            covered = (self.counts[axis] - 1) * self.strides[axis] + self.sizes[axis]
            flat += [before, covered - before - self.extents[axis]]
        return functional.pad(x, flat, value=value) if any(flat) else x

    def _can_use_torch_padding(self) -> bool:
        """Return whether torch's own padding gives the same windows.

        The padding must be equal on both sides and at most half a window, and the number of windows must be the same.
        """
        return all(
            before == after and 2 * before <= size and count == (extent + 2 * before - size) // stride + 1
            for (before, after), size, stride, extent, count in zip(
                self.pads, self.sizes, self.strides, self.extents, self.counts
            )
        )

    def sum_windows(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over each window, with zeros around `x`."""
        x, sizes, strides = self.padded(x, 0.0), self.sizes, self.strides
        if len(sizes) == 1:
            return functional.avg_pool2d(x.unsqueeze(2), [1, *sizes], [1, *strides], divisor_override=1).squeeze(2)
        pool = functional.avg_pool2d if len(sizes) == 2 else functional.avg_pool3d
        return pool(x, sizes, strides, divisor_override=1)

    def compute_divisors(self, x: torch.Tensor, exclude_padding: bool) -> torch.Tensor:
        """Count the elements that each window averages: those in the input, or in input and padding."""
        total = torch.ones((), dtype=x.dtype)
        for axis, size in enumerate(self.sizes):
            before, after = self.pads[axis]
            low, high = (0, self.extents[axis]) if exclude_padding else (-before, self.extents[axis] + after)
            starts = [index * self.strides[axis] - before for index in range(self.counts[axis])]
            inside = [max(min(start + size, high) - max(start, low), 0) for start in starts]
            total = total.unsqueeze(-1) * torch.tensor(inside, dtype=x.dtype)
        return total


def _plan_windows(ins: Any, x: torch.Tensor) -> _PoolWindows:
    windows: _PoolWindows = ins.memo(x.shape, lambda: _PoolWindows(ins, x.shape))
    return windows


@register_kernel("avg_pool")
def avg_pool(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    windows = _plan_windows(ins, x)
    return windows.sum_windows(x).div_(windows.compute_divisors(x, bool(ins.value("exclude_padding_from_average"))))


@register_kernel("l2_pool")
def l2_pool(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    return _plan_windows(ins, x).sum_windows(x.square()).sqrt_()


@register_kernel("max_pool")
def max_pool(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    windows = _plan_windows(ins, x)
    pool = (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)[len(windows.sizes) - 1]
    if windows.can_use_torch_padding:
        return pool(x, windows.sizes, windows.strides, [before for before, _ in windows.pads])
    return pool(windows.padded(x, -math.inf), windows.sizes, windows.strides)
