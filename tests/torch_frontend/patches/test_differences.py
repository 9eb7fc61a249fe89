"""`torch.diff`."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.randn(3, 6)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_differences(frontend: str) -> None:
    def diff(x: torch.Tensor) -> torch.Tensor:
        return torch.diff(x) + torch.diff(x, n=2, dim=-1, prepend=x[:, :1])

    check(diff, X, frontend=frontend)


def test_integers_bools_and_other_dimensions() -> None:
    check(lambda x: torch.diff(x, dim=0, append=x[:1]), (X * 5).int())
    check(lambda x: torch.diff(x > 0, n=2).int(), X)
    check(lambda x: torch.diff(x, n=0), X)


def test_flexible_size() -> None:
    check(lambda x: torch.diff(x, dim=0), X, flexible=[0], at=[(torch.randn(2, 6),), (torch.randn(64, 6),)])


def test_nothing_left_is_refused() -> None:
    with pytest.raises(Exception, match="6 differences of 6 elements leave none"):
        check(lambda x: torch.diff(x, n=6), X)
