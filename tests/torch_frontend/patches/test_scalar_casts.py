"""Sizes as numbers, traced, scripted and exported."""

from __future__ import annotations

import math

import pytest
import torch

from ..checks import check

X = torch.arange(24.0).reshape(2, 4, 3)
Y = torch.arange(45.0).reshape(3, 5, 3)
EACH = pytest.mark.parametrize(("frontend", "flexible"), [("trace", ()), ("trace", (0, 1)), ("script", ()),
                                                          ("script", (0, 1)), ("export", ())])


def both(function: object, frontend: str, flexible: tuple[int, ...]) -> None:
    check(function, X, frontend=frontend, flexible=flexible, at=[[Y]] if flexible else [])


@EACH
def test_unpacked_sizes(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b, _ = x.shape
        return torch.zeros([a, b]) + x[:, :, 0]

    both(function, frontend, flexible)


@EACH
def test_arithmetic_of_sizes(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        half = int(x.shape[1] // 2)
        return x[:, :half] * (x.shape[0] * 2 - 1) + x[:, half:half * 2].reshape(x.shape[0], half, -1)

    both(function, frontend, flexible)


@EACH
def test_arange_of_a_size(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[1]).unsqueeze(1) + torch.arange(1, x.shape[0] * 2, 2).reshape(-1, 1, 1)

    both(function, frontend, flexible)


def test_extremes_of_exported_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        rows = min(x.shape[1], 6)
        padded = torch.nn.functional.pad(x[:, :rows], (0, 0, 0, max(16 - x.shape[1], 0)))
        return padded.sum(1) * max(x.shape[1], 3)

    check(function, torch.randn(2, 8, 3), frontend="export", flexible=[1], lowest=7, at=[(torch.randn(2, 20, 3),)])


@EACH
def test_root_of_a_size(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x / math.sqrt(x.shape[2]) * float(x.shape[0] + 1)

    check(function, X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "script"])
def test_numbers_of_one_element_tensors(frontend: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("size", torch.tensor([2]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * int(self.size)

    check(Model().eval(), X, frontend=frontend)
