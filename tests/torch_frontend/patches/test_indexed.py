"""`index_add`, `index_copy`, `index_fill`."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.randn(2, 4, 3)
INDEX = torch.tensor([2, 0, 2])
SOURCE = torch.randn(2, 3, 3)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_computed_index(frontend: str) -> None:
    def write(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        added = x.index_add(1, index, source, alpha=2.0)
        return added + x.index_copy(1, index[:2], source[:, :2]) + x.index_fill(1, index, 7.0)

    check(write, X, INDEX, SOURCE, frontend=frontend, at=[(X, torch.tensor([1, 3, 1]), SOURCE)])


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_constant_index(frontend: str) -> None:
    def write(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        added = x.index_add(-2, INDEX, source)
        return added + x.index_copy(1, INDEX[:2], source[:, :2]) + x.index_fill(2, torch.tensor([-1, 0]), 7.0)

    check(write, X, SOURCE, frontend=frontend)


def test_computed_value_and_other_dtypes() -> None:
    check(lambda x: x.index_fill(0, torch.tensor(1), x.sum()), X)
    check(lambda x: (x > 0).index_fill(1, INDEX, torch.tensor(True)).int(), X)
    check(lambda x: (x > 0).index_copy(1, INDEX[:2], x[:, :2] > 1).int(), X)
    check(lambda x: x.index_add(0, torch.tensor([1, 1]), x[:2], alpha=3), (X * 9).int())


def test_flexible_size() -> None:
    check(lambda x, index: x.index_fill(0, index, 1.0) + x.index_add(0, index, x[:2]), torch.randn(4, 3),
          torch.tensor([1, -1]) % 4, flexible=[0], at=[(torch.randn(2, 3), torch.tensor([0, 0]))])


def test_negative_computed_index() -> None:
    check(lambda x, index: x.index_fill(1, index, 1.0), X, torch.tensor([-1, 0]))


def test_adding_bools_is_refused() -> None:
    with pytest.raises(Exception, match="adds bools"):
        check(lambda x: (x > 0).index_add(1, INDEX, (x > 0)[:, :3]).int(), X)
