"""`triu`, `tril`, `roll`."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.randn(2, 4, 5)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_triangles(frontend: str) -> None:
    def triangles(x: torch.Tensor) -> torch.Tensor:
        return torch.triu(x, 1) + torch.tril(x, -2) + torch.triu(x, -1) + torch.tril(x) + torch.triu(x > 0).int()

    check(triangles, X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_infinity_stays_infinity(frontend: str) -> None:
    check(lambda x: torch.triu(x, 1) + torch.tril(x, -1), torch.full((3, 3), float("inf")), frontend=frontend)
    check(lambda x: torch.softmax(x + torch.full((5, 5), float("-inf")).triu(1)[:4], -1), X, frontend=frontend)


def test_flexible_sizes() -> None:
    check(lambda x: torch.triu(x, 1) + torch.tril(x, -1), torch.randn(3, 4), flexible=[0, 1],
          at=[(torch.randn(6, 2),), (torch.randn(2, 9),)])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_rolls(frontend: str) -> None:
    def rolls(x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, [1, -7], [1, 2]) + torch.roll(x, [2], [0])

    check(rolls, X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_roll_of_everything_and_of_flexible_sizes(frontend: str) -> None:
    check(lambda x: torch.roll(x, 3), X, frontend=frontend)
    check(lambda x: torch.roll(x, 1, 0) + torch.roll(x, -1, 0), torch.randn(4, 3), frontend=frontend, flexible=[0],
          at=[(torch.randn(2, 3),)])


def test_a_roll_beyond_a_flexible_size_needs_no_gather() -> None:
    mlmodel = check(lambda x: torch.roll(x, 5, 0) - torch.roll(x, -3, 0), torch.randn(4, 3), flexible=[0],
                    at=[[torch.randn(size, 3)] for size in (2, 5, 7)])
    assert "gather" not in {op.op_type for op in mlmodel._mil_program.functions["main"].operations}
