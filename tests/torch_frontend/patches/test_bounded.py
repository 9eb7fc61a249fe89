"""`hardtanh` and `elu` with defaults and ints."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ..checks import FRONTENDS, check

X = torch.randn(2, 3, 4) * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_default_and_int_arguments(frontend: str) -> None:
    def bounded(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.hardtanh(x) + torch.ops.aten.hardtanh(x, -2, 3) + functional.elu(x) \
            + torch.ops.aten.elu(x, 2, 3, 1) + torch.ops.aten.elu(x, 1, 1, 2)

    check(bounded, X, frontend=frontend)


def test_written_in_place() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        functional.hardtanh_(x[0], -1, 1)
        functional.elu_(x[1])
        return x

    check(write, X)


def test_integers() -> None:
    check(lambda x: torch.ops.aten.hardtanh(x, -1, 2), torch.arange(-4, 5, dtype=torch.int32))
