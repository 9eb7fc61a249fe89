"""Matrices times vectors."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.rand(2, 4, 4)
V = torch.rand(4)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_each_side(frontend: str) -> None:
    def model(x: torch.Tensor, v: torch.Tensor):
        w = torch.matmul(v, v) + torch.dot(v, v)
        return x @ v, v @ x, x[0] @ v, v @ x[0], torch.mv(x[1], v) + w, x @ x

    check(model, X, V, frontend=frontend)


def test_consts_and_whole_numbers() -> None:
    check(lambda x: (x @ torch.arange(4.0), torch.ones(4) @ x, (x * 9).int() @ torch.arange(4, dtype=torch.int32)), X)
    check(lambda x: (x * 9).int() @ torch.arange(16, dtype=torch.int32).reshape(4, 4), X)


def test_a_flexible_batch() -> None:
    check(lambda x, v: x @ v + v @ x, X, V, flexible=[0], at=[(torch.rand(7, 4, 4), V)])
