"""`torch.fmod`."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_sign_of_the_dividend(frontend: str) -> None:
    def fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.fmod(x, y) + torch.fmod(x, -1.5)

    x = torch.tensor([[-7.5, 7.5, -0.5], [5.0, -5.0, 0.0]])
    check(fmod, x, torch.tensor([2.0, -2.0, 3.0]), frontend=frontend)
