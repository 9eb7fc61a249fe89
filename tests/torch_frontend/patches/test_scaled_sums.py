"""Sums with a factor, mixed dtypes."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

F = torch.tensor([[1.5, -2.0, 0.25], [3.0, 0.0, -1.0]])
N = torch.tensor([[1, -2, 3], [4, 0, 2]])
EACH = pytest.mark.parametrize("frontend", FRONTENDS)


@EACH
def test_alpha(frontend: str) -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.add(x, n, alpha=2), torch.sub(n, x, alpha=0.5), torch.rsub(x, 3, alpha=2),
                          torch.rsub(x, 2.5), torch.add(n, 0.5), n - x])

    check(function, F, N, frontend=frontend)


@EACH
def test_ints_stay_ints(frontend: str) -> None:
    check(lambda n: torch.add(n, n, alpha=3) // 2, N, frontend="trace")
    big = torch.tensor([2 ** 30 + 1])
    check(lambda n: n + 2, big, frontend="trace" if frontend == "script" else frontend)


@EACH
def test_bools(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x > 0, x > 1
        return torch.stack([(a + b).float(), a + 1.5, (a < b).float(), (a >= b).float(), a * x])

    check(function, F, frontend=frontend)


@EACH
def test_products_with_factors(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        square = torch.addmm(x[:, :2], x, x.t(), beta=3, alpha=2)
        batch = torch.baddbmm(x[None, :, :2], x[None], x.t()[None], beta=0, alpha=0.5)
        return square + batch + torch.addmm(x[:, :2], x, x.t())

    check(function, F, frontend=frontend)


def test_outer_of_ints_and_floats() -> None:
    check(lambda x, n: torch.outer(n[0], x[0]), F, N)


def test_sizes() -> None:
    check(lambda x: x.reshape(x.shape[0] + 1 - 1, -1) * (x.shape[0] + 2), F, flexible=(0,), at=[[torch.ones(5, 3)]])
