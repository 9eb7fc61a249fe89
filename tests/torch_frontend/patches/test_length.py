"""`len` in scripts."""

from __future__ import annotations

import pytest
import torch

from ..checks import check

X = torch.rand(3, 4)


def of_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * len(x)


def of_shape(x: torch.Tensor) -> torch.Tensor:
    return x * len(x.shape)


def of_parts(x: torch.Tensor) -> torch.Tensor:
    return x * len(torch.unbind(x, 1))


@pytest.mark.parametrize("function", [of_tensor, of_shape, of_parts])
def test_a_fixed_size(function) -> None:
    check(function, X, frontend="script")


@pytest.mark.parametrize("function", [of_tensor, of_shape])
def test_a_flexible_size(function) -> None:
    check(function, X, frontend="script", flexible=[0], at=[(torch.rand(7, 4),)])
