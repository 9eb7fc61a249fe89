"""expand to no dimensions."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.arange(6.).reshape(2, 3)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_number_expanded_to_a_number(frontend: str) -> None:
    def model(x: torch.Tensor):
        return x.sum().expand([]), x * torch.ones(()).expand([]), x.sum().expand_as(x[0, 0]), \
            torch.broadcast_to(x.mean(), [])

    check(model, X, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_all_others_are_as_ever(frontend: str) -> None:
    def model(x: torch.Tensor):
        return x[:, :1].expand(-1, 4), x.sum().expand(3, 2), x[0].expand_as(x), x.sum().expand_as(x), x.expand(1, 2, 3)

    check(model, X, frontend=frontend)


def test_flexible_sizes() -> None:
    check(lambda x: x[:1].expand(x.shape[0], 3) + x.sum().expand(()), X, flexible=[0], at=[(torch.rand(5, 3),)])
