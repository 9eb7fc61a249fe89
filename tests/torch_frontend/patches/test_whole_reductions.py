"""Reductions over all axes behind a transpose."""

from __future__ import annotations

import torch

from ..checks import check


def test_sums_of_everything_and_of_some_axes() -> None:
    def sums(x: torch.Tensor) -> torch.Tensor:
        turned = torch.relu(x.transpose(0, 1))
        return turned + turned.sum() + turned.sum(1, keepdim=True) + turned.max()

    check(sums, torch.randn(2, 3))
    check(sums, torch.randn(2, 3), flexible=(0,), at=[[torch.randn(4, 3)]])
