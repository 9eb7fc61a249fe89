"""Reductions of ints, bools and with a dtype."""

from __future__ import annotations

import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check, convert

F = torch.tensor([[0.25, -2.0, 3.0], [0.0, 0.5, float("nan")]])
N = torch.tensor([[1, -2, 4], [4, 0, 3]])
EACH = pytest.mark.parametrize("frontend", FRONTENDS)


@EACH
def test_dtypes(frontend: str) -> None:
    def function(n: torch.Tensor) -> torch.Tensor:
        whole = torch.mean(n, dtype=torch.float32) + n.sum(dtype=torch.float32) / 3 + n.sum() / 2
        return n.mean(1, dtype=torch.float32) + torch.sum(n, dim=[1], dtype=torch.float32) / 4 + whole

    check(function, N, frontend=frontend)


@EACH
def test_truth(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        each = torch.cat([x.all(1), x.any(1), x.all(dim=0), (x > 0).any(-1), (x > 5).any().reshape(1)])
        return each.float() + (x * 0 + 1 > 0).all().float()

    check(function, F, frontend=frontend)


@EACH
def test_counts(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        found = x > 0
        return found.sum(1, keepdim=True) / 2 + found.sum() + found.float().mean((0, 1)) + x.nan_to_num().mean()

    check(function, F, frontend=frontend)


@EACH
def test_axes(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(0, 2), keepdim=True) + x.sum(-2, keepdim=True) + x.mean(1, keepdim=True) + x.sum()

    check(function, torch.arange(24.0).reshape(2, 4, 3), frontend=frontend)


def test_flexible_sizes() -> None:
    more = torch.ones(4, 7) * 3
    check(lambda x: x.mean(1) + x.sum(1) + (x > 2).sum(1), torch.ones(2, 3), flexible=(0, 1), at=[[more]])


def test_refusal() -> None:
    with pytest.raises(NotConverted, match="dtype"):
        convert(lambda x: x.sum(1, dtype=torch.uint8), (N,))


def test_truth_over_no_axis_is_that_of_each_element() -> None:
    x = torch.tensor([[1., -1.], [0., 2.]])
    check(lambda x: torch.any(x > 0, dim=[]).float() + torch.all(x, dim=[]).float(), x)
