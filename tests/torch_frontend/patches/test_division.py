"""Rounded divisions and remainders."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check, convert

X = torch.tensor([[-7.5, 7.5, -0.25, 1.0], [5.75, -5.0, 0.0, 2.0]])
Y = torch.tensor([2.0, -2.0, 3.0, 1.0])
I = torch.tensor([[-7, 7, 2 ** 30 + 1], [5, -5, 0]])
J = torch.tensor([2, -2, 3])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_by_one(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x % 1, torch.remainder(x, 1.0), x // 1, torch.div(x, 1, rounding_mode="floor"),
                          torch.div(x, 1.0, rounding_mode="trunc"), torch.floor_divide(x, 1), x % -1])

    check(function, X, frontend=frontend)


def test_by_one_in_the_model() -> None:
    check(lambda x: x % 1, X)
    check(lambda x, y: x // y[:, :1] + x % y[:, :1], X, torch.ones(2, 2))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_floats(frontend: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x % y, x // y, torch.div(x, y, rounding_mode="trunc"), x / y, 3 / (y + x * 0), x % 0.75])

    check(function, X, Y, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_ints_stay_ints(frontend: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x % y, x // y, torch.div(x, y, rounding_mode="floor"),
                          torch.div(x, y, rounding_mode="trunc"), x // 1, x % 1])

    mlmodel = check(function, I, J, frontend=frontend)
    assert not mlmodel._mil_program.find_ops(op_type="floor")


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_true_division_of_ints(frontend: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x / y + x / 4 + torch.true_divide(y, 2.5)

    check(function, I, J, frontend=frontend)


def test_floats_over_ints() -> None:
    check(lambda x, y: torch.cat([x // y, x % y, x / y]), X[:, :3], J)


def test_ints_keep_the_host_cleanup() -> None:
    mlmodel = convert(lambda x: (x // 1) * 2, (I,))
    assert not mlmodel._mil_program.find_ops(op_type="floor_div")
