"""rms_norm, cosine_similarity, mse_loss and cross."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch
from torch.nn import functional as F

from ..checks import FRONTENDS, check, convert, outputs

X = torch.rand(2, 4, 6) - 0.5
Y = torch.rand(2, 4, 6) - 0.5


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_rms_norm(frontend: str) -> None:
    weight = torch.rand(4, 6)

    def model(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (6,)) + F.rms_norm(x, (4, 6), weight, 0.01) + F.rms_norm(x * 0, (6,))

    check(model, X * 1e-2, frontend=frontend, at=[(X * 1e3,)])


def test_rms_norm_does_not_overflow_in_half_precision() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (6,), eps=1e-5)

    mlmodel = convert(model, [X], precision=ct.precision.FLOAT16)
    found = outputs(mlmodel, [X * 4e3], precision="float16")[0]
    assert torch.allclose(torch.tensor(found).float(), model(X * 4e3), atol=2e-2)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_cosine_similarity(frontend: str) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = torch.cosine_similarity(x, y) + torch.cosine_similarity(x, y[0], 1, 0.5)
        return one + torch.cosine_similarity(x * 0, y)

    check(model, X, Y, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_mse_loss(frontend: str) -> None:
    check(lambda x, y: F.mse_loss(x, y) + F.mse_loss(x, y, reduction="none") + F.mse_loss(x, y, reduction="sum"),
          X, Y, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_cross(frontend: str) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cross(x, y) + torch.cross(x, y, dim=2) + torch.linalg.cross(x, y[:1])

    check(model, torch.rand(2, 3, 3), torch.rand(2, 3, 3), frontend=frontend)


def test_flexible_sizes() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cosine_similarity(x, x + 1, -1)[:, None] + torch.linalg.cross(x, x + 1) + F.rms_norm(x, (3,))

    check(model, torch.rand(4, 3), flexible=[0], at=[(torch.rand(7, 3),)])
