"""`trunc`, `hypot`, `cdist`, `bucketize`."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.randn(3, 4) * 3
Y = torch.randn(3, 4)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_formulas(frontend: str) -> None:
    def formulas(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.trunc(x) + torch.hypot(x, y) + torch.cdist(x, y)[:, :1] + torch.cdist(x, y, 1.0)[:, :1]

    check(formulas, X, Y, frontend=frontend)


def test_hypot_of_zeros() -> None:
    check(lambda x, y: torch.hypot(x, y), torch.tensor([0.0, 3.0, 0.0]), torch.tensor([0.0, -4.0, 2.0]))


@pytest.mark.parametrize("power", [0.0, 3.0, float("inf")])
def test_distances(power: float) -> None:
    check(lambda x, y: torch.cdist(x, y, power), X[None], Y[None, :2])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_buckets(frontend: str) -> None:
    def buckets(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(x, edges) + torch.bucketize(x, edges, right=True) * 10

    check(buckets, torch.tensor([[-2.0, -1.0], [0.5, 3.0]]), torch.tensor([-1.0, 0.0, 3.0]), frontend=frontend)
