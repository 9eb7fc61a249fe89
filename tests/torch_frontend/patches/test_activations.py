"""`softplus`, `reciprocal`, `gelu`, `asinh`, `acosh`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, softplus

from ..checks import FRONTENDS, check

X = torch.randn(2, 3, 4) * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_activations(frontend: str) -> None:
    def activations(x: torch.Tensor) -> torch.Tensor:
        return softplus(x, 2.0, 1.0) + softplus(x) + softplus(x, 0.5) + gelu(x, approximate="tanh") + gelu(x)

    check(activations, X, frontend=frontend, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_reciprocal_of_the_small(frontend: str) -> None:
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.reciprocal(x)

    check(inverse, X * 1e-3, frontend=frontend)


def test_reciprocal_of_integers() -> None:
    check(lambda x: torch.reciprocal(x), torch.tensor([1, 2, -4], dtype=torch.int32))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_inverse_hyperbolic(frontend: str) -> None:
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.asinh(x) + torch.acosh(x.abs() + 1)

    check(inverse, X, frontend=frontend)
