"""fmax, fmin, copysign, signbit, erfc."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[1.0, -2.0, NAN, NAN, 0.0, -0.0, INF, -INF]])
Y = torch.tensor([[-0.0, 3.0, 5.0, NAN, -1.0, 1.0, 2.0, NAN], [0.0, -3.0, NAN, 4.0, 1.0, -1.0, NAN, -INF]])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_numbers_and_none(frontend: str) -> None:
    def model(x: torch.Tensor, y: torch.Tensor):
        return torch.fmax(x, y), torch.fmin(x, y), torch.fmax((y > 0).int(), torch.ones(8, dtype=torch.int32))

    check(model, X, Y, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_signs(frontend: str) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = torch.nan_to_num(x[:, :6]), torch.nan_to_num(y[:, :6])
        return torch.copysign(x, y), torch.copysign(x, -1.0), torch.signbit(y).int(), torch.erfc(x)

    check(model, X, Y, frontend=frontend)
    check(lambda x: torch.signbit(x).int() + torch.signbit(x.int()).int(), Y[:, [0, 1, 4, 5]], frontend=frontend)
