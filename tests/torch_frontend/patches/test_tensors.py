"""torch.tensor and torch.as_tensor in scripts."""

from __future__ import annotations

import torch

from ..checks import check


def numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x + torch.tensor(5), x * torch.tensor(2.5) + torch.tensor([1, 2]), x * torch.tensor([[True], [False]])


def of_sizes(x: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([x.shape[0], x.shape[1]]) + torch.tensor(x.shape[0] / 4)
    return x + sizes + torch.as_tensor(x, dtype=torch.int32)


def test_dtypes_and_lists() -> None:
    check(numbers, torch.tensor([[1., 2.], [3., 4.]]), frontend="script")


def test_numbers_the_model_computes() -> None:
    check(of_sizes, torch.ones(3, 2), frontend="script", flexible=(0,), at=[[torch.ones(5, 2)]])
