"""`chunk` and `split` along a flexible axis."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.arange(24.0).reshape(2, 4, 3)
Y = torch.arange(63.0).reshape(3, 7, 3)


@pytest.mark.parametrize("at", [Y, Y[:, :5], Y[:, :6]])
def test_chunk(at: torch.Tensor) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([second, first], -2)

    check(function, X, flexible=(0, 1), at=[[at]])


def test_split() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = x.split(2, 1)
        return first - second.sum(1, keepdim=True)

    check(function, X, flexible=(0, 1), at=[[X[:, :3]]])


def test_computed_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = x.split([1, x.shape[1] - 1], 1)
        return torch.cat([second, first], 1)

    check(function, X, flexible=(0, 1), at=[[Y]])


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_other_axis(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = x.split([1, 2], 2)
        return first + second + x.chunk(3, 2)[1] + x.split(1, 2)[0]

    check(function, X, flexible=(0, 1), at=[[Y]], frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_known_sizes(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.split(2, 1)[1] + torch.split(x, [2, 2], 1)[0]

    check(function, X, frontend=frontend)


def indexed(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(2, -1)[0].sum() + x.chunk(3, 0)[1] * x.split(2, 1)[0].sum()


def test_pieces_that_a_script_indexes() -> None:
    check(indexed, torch.randn(4, 5), frontend="script")
