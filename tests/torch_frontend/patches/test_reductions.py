"""Variance with corrections, `prod`, `median`, `kthvalue`, `argmax` over everything."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.randn(2, 5, 3)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_corrections(frontend: str) -> None:
    def spreads(x: torch.Tensor) -> torch.Tensor:
        one = x.var(1, correction=2) + x.std(1) + x.var(1, unbiased=False) + x.std((0, 2), correction=0).sum()
        return one + x.std() + x.var() + torch.var(x, unbiased=False)

    check(spreads, X, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_with_the_mean(frontend: str) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, dim=1, keepdim=True)
        deviation, again = torch.std_mean(x, dim=1, keepdim=True)
        return (x - mean) / (variance + 0.1).sqrt() + deviation * again

    check(both, X, frontend=frontend)


def test_variance_of_a_flexible_size() -> None:
    check(lambda x: x.var(0, correction=0.5) + x.std(), torch.randn(4, 3), flexible=[0],
          at=[(torch.randn(2, 3),), (torch.randn(64, 3),)])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_products(frontend: str) -> None:
    def products(x: torch.Tensor) -> torch.Tensor:
        return torch.prod(x) + torch.prod(x, 1, keepdim=True) + torch.prod(x > -9.0, 2, keepdim=True) / 2

    check(products, X, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_order_statistics(frontend: str) -> None:
    def statistics(x: torch.Tensor) -> torch.Tensor:
        values, places = torch.median(x, 1)
        low, low_places = torch.kthvalue(x, 2, 1, True)
        return values + places + (low + low_places)[:, 0] + torch.median(x)

    check(statistics, X, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_argmax_over_everything(frontend: str) -> None:
    def places(x: torch.Tensor) -> torch.Tensor:
        return torch.argmax(x) + torch.argmin(x, 1, keepdim=True) + torch.argmax(x, dim=-1, keepdim=True)

    check(places, X, frontend=frontend)


def test_sorting_a_flexible_size_is_refused() -> None:
    with pytest.raises(Exception, match="sorts along a flexible size"):
        check(lambda x: x.median(0)[0], torch.randn(4, 3), flexible=[0])


def test_the_mean_of_a_layer_norm_by_hand_is_computed_once() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5)

    mlmodel = check(norm, torch.randn(2, 3, 4))
    assert len(mlmodel._mil_program.find_ops(op_type="reduce_mean")) == 2
