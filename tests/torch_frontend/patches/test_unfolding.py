"""`Tensor.unfold`."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.arange(24.0).reshape(2, 12)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_few_large_and_many_small_windows(frontend: str) -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        return x.unfold(1, 10, 2).sum(1) + x.unfold(-1, 2, 1).sum(1)[:, :1]

    check(windows, X, frontend=frontend)


@pytest.mark.parametrize(("dim", "size", "step"), [(0, 2, 1), (1, 5, 3), (1, 12, 1), (-1, 1, 5), (1, 3, 4)])
def test_every_dimension(dim: int, size: int, step: int) -> None:
    check(lambda x: x.unfold(dim, size, step), X)


def test_patches_of_an_image() -> None:
    check(lambda x: x.unfold(0, 2, 2).unfold(1, 3, 3), X.reshape(4, 6))
    check(lambda x: (x > 5).unfold(1, 2, 1).int(), X)


def test_flexible_size() -> None:
    check(lambda x: x.unfold(0, 2, 1), torch.randn(4, 3), flexible=[0], at=[(torch.randn(9, 3),)])


def test_rank_is_refused() -> None:
    with pytest.raises(Exception, match="unfolds a tensor of rank 5"):
        check(lambda x: x.unfold(1, 2, 1), torch.randn(1, 2, 2, 2, 2))
