"""Ops lowered by torch's own definition."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.rand(2, 4, 4) * 0.8 + 0.1
Y = torch.rand(2, 4, 4) * 0.8 + 0.1


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_elementwise(frontend: str) -> None:
    def formulas(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = torch.lerp(x, y, 0.3) + torch.lerp(x, y, y) + torch.addcmul(x, x, y, value=0.5) + torch.logaddexp(x, y)
        return one + torch.addcdiv(x, x, y, value=2.0) + torch.logit(x, eps=0.2) + torch.sinc(x) + torch.xlogy(x, y)

    check(formulas, X, Y, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_places(frontend: str) -> None:
    def moved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = torch.movedim(x, 1, 2) + torch.rot90(x, 1, (1, 2)) + torch.take_along_dim(x, (y * 4).long(), 1)
        return one + torch.tensor_split(y, 2, 0)[0] + torch.kron(x[0, :2, :2], y[0, :2, :2])

    check(moved, X, Y, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_statistics(frontend: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        gaps = torch.where(x > 0.4, x, torch.nan)
        one = torch.quantile(x, 0.3, dim=1) + torch.quantile(x, torch.tensor([0.1, 0.5]), dim=1, keepdim=True)[1]
        return one + torch.nanmean(gaps, 1) + torch.isin((x[:, 0] * 4).int(), torch.tensor([1, 2])).float()

    check(model, X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_losses(frontend: str) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(x[0], torch.tensor([0, 1, 2, 0])) + y.sum() * 0
        loss = loss + torch.nn.functional.nll_loss(x[1], torch.tensor([0, -100, 2, 0]), torch.tensor([1.0, 2, 3, 4]))
        return loss + torch.nn.functional.poisson_nll_loss(x, y) + torch.nn.functional.soft_margin_loss(x, y)

    check(model, X, Y, frontend=frontend)


def test_flexible_size() -> None:
    check(lambda x: torch.lerp(x, x * 2, 0.3) + torch.logaddexp(x, x), torch.rand(4, 3), flexible=[0],
          at=[(torch.rand(2, 3),), (torch.rand(64, 3),)])


def test_a_graph_that_hangs_on_a_flexible_size_is_refused() -> None:
    with pytest.raises(Exception, match="depends on a flexible size"):
        check(lambda x: torch.diag_embed(x), torch.rand(4, 3), flexible=[0, 1])
