"""slice_scatter, select_scatter, diagonal_scatter, copy: values, and the ops they become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import pytest
import torch

from ..checks import FRONTENDS, check, convert

X = torch.arange(60.).reshape(3, 4, 5)


def middle(x: torch.Tensor) -> torch.Tensor:
    return torch.slice_scatter(x, x[:, 1:3] * 2, 1, 1, 3)


def steps(x: torch.Tensor) -> torch.Tensor:
    return torch.slice_scatter(x, -x[..., 1:5:2], 2, 1, 5, 2)


def to_the_end(x: torch.Tensor) -> torch.Tensor:
    return torch.slice_scatter(x, x[..., -2:] + 1, -1, -2)


def one(x: torch.Tensor) -> torch.Tensor:
    return torch.select_scatter(x, x[:, 0] * 3, 1, -1)


def diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.diagonal_scatter(x, x.diagonal(1, 1, 2) * 0 - 1, 1, 1, 2)


def below_diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.diagonal_scatter(x, x.diagonal(-2, 1, 0) * 0 - 1, -2, 1, 0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
@pytest.mark.parametrize("function", [middle, steps, to_the_end, one, diagonal, below_diagonal])
def test_values(function: Callable[..., Any], target: Any) -> None:
    for frontend in FRONTENDS:
        check(function, X, frontend=frontend, target=target)


def ops(mlmodel: Any) -> list[str]:
    return [op.op_type for op in mlmodel._mil_program.functions["main"].operations if op.op_type != "const"]


@pytest.mark.parametrize("function, target, expected", [
    (middle, ct.target.iOS16, {"slice_by_index", "mul", "concat"}),
    (middle, ct.target.iOS18, {"slice_by_index", "mul", "slice_update"}),
    (one, ct.target.iOS16, {"slice_by_index", "mul", "expand_dims", "concat"}),
    (steps, ct.target.iOS18, {"slice_by_index", "mul", "slice_update"}),
])
def test_ops(function: Callable[..., Any], target: Any, expected: set[str]) -> None:
    assert set(ops(convert(function, [X], target=target))) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
@pytest.mark.parametrize("function", [middle, to_the_end, one])
def test_flexible_sizes(function: Callable[..., Any], target: Any) -> None:
    small = torch.arange(48.).reshape(4, 4, 3)
    for frontend in ("trace", "export"):
        check(function, X, frontend=frontend, flexible=(0, 2), at=[[small]], target=target, lowest=3)


@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
def test_a_slice_that_a_small_size_cuts_short(target: Any) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x[:, 1:3] = x[:, 1:3] + 1
        return x

    check(write, torch.arange(10.).reshape(2, 5), flexible=(1,), at=[[torch.arange(4.).reshape(2, 2)]], target=target)


class AtPosition(torch.nn.Module):
    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        start = int(position)
        x[:, start] = x[:, 0] + 5
        x[:, start:start + 2] = -x[:, 2:4]
        return x


@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
def test_a_position_the_model_computes(target: Any) -> None:
    check(AtPosition(), X, torch.tensor([1]), frontend="script", target=target,
          at=[[X, torch.tensor([place])] for place in (0, 2)])


def test_bools_and_ints() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        mask = x > 20
        mask[:, 1:3] = False
        counts = x.to(torch.int64)
        counts[..., ::2] = 7
        return mask * 1.0 + counts

    for frontend in FRONTENDS:
        check(write, X, frontend=frontend)


def test_nothing_is_left_of_what_is_replaced() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x[:, 1] = 0
        return x

    bad = X.clone()
    bad[:, 1] = float("nan")
    check(write, X, at=[[bad]])


def from_the_end(x: torch.Tensor) -> torch.Tensor:
    x[..., -4:] = x[..., -4:] * 2 + 1
    x[..., -4:-1] += 5
    return x


@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
def test_a_slice_from_the_end_that_begins_before_the_front(target: Any) -> None:
    others = [[torch.arange(2. * size).reshape(2, size)] for size in (2, 3, 4, 7)]
    check(from_the_end, torch.arange(12.).reshape(2, 6), flexible=(1,), at=others, target=target)


def of_nothing(x: torch.Tensor) -> torch.Tensor:
    x[:, 3:3] = 1
    return x


def test_a_write_to_nothing() -> None:
    for frontend in FRONTENDS:
        check(of_nothing, X, frontend=frontend)
