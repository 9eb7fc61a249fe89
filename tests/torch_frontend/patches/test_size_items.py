"""Scripted sizes."""

from __future__ import annotations

import pytest
import torch

from ..checks import check

X = torch.arange(24.0).reshape(2, 4, 3)
Y = torch.arange(45.0).reshape(3, 5, 3)


@pytest.mark.parametrize("flexible", [(), (0, 1)])
def test_items_of_a_shape(flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        sizes = x.shape
        return x.reshape(sizes[0] * sizes[1], sizes[-1]) * x.size(1) + sizes[0] * x.shape[1] + x.dim()

    check(function, X, frontend="script", flexible=flexible, at=[[Y]] if flexible else [])


@pytest.mark.parametrize("flexible", [(), (0, 1)])
def test_count_of_elements(flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x / x.numel()

    check(function, X, frontend="script", flexible=flexible, at=[[Y]] if flexible else [])


def test_items_of_a_list_of_numbers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        steps = [3, 5, 7]
        return x * steps[1] + steps[-1] + steps[0]

    check(function, X, frontend="script")


def test_items_of_a_list_of_tensors() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.split(x, 2, 0)[0] + torch.split(x, 1, 1)[1] + [x[0]][0]

    check(function, X, frontend="script")
