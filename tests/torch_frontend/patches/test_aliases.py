"""Second names of ops."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.rand(2, 4, 4) * 0.8 + 0.1
Y = torch.rand(2, 4, 4) * 0.8 + 0.1


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_second_names(frontend: str) -> None:
    def aliases(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = torch.multiply(x, y) + torch.subtract(x, 0.5) + torch.arctan(x) + torch.greater(x, y).int()
        one = one + torch.divide(x, y, rounding_mode="floor") + torch.divide(x, 2.0) + torch.multiply(y, 3)
        return one + torch.divide(x, y) + torch.swapaxes(torch.concatenate([x, y], 1)[:, :4], 1, 2)

    check(aliases, X, Y, frontend=frontend)


def test_numbers_on_the_left() -> None:
    check(lambda x, y: 1 - x - (2.5 - y) + torch.rsub(x, y, alpha=2) + torch.rsub(x, 3, alpha=2), X, Y,
          frontend="export")
