"""Functions of ints and bools."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.tensor([[1, 2, 3], [4, 1, 1]])
NAMES = ("acos", "asin", "atan", "cos", "cosh", "erf", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "rsqrt",
         "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh")


def test_functions_of_ints() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        ones = x.clamp(0, 1)
        return torch.stack([getattr(torch, name)(ones if name[0] == "a" else x) for name in NAMES])

    check(function, X)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_roots_of_ints(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x) + torch.exp(x > 2) + torch.logsumexp(x, 1, keepdim=True) + torch.atan2(x, x + 1)

    check(function, X, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_ints_stay_ints(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x - 2
        return torch.floor(y) * torch.ceil(y) + torch.round(y) + torch.relu(y)

    check(function, X, frontend=frontend)


def test_floats_are_left_to_the_host() -> None:
    check(lambda x: torch.sqrt(x) + torch.floor(x) + torch.relu(x - 2) + torch.round(x), X / 2)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_round_to_decimals(frontend: str) -> None:
    check(lambda x: torch.round(x, decimals=2) + torch.round(x, decimals=-1) + torch.round(x), torch.rand(9) * 40 - 20,
          frontend=frontend)
