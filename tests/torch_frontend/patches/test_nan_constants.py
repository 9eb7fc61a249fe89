"""Buffers and parameters that hold NaN."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.tensor([[1.0, -2, 3], [4, 5, -6]])


class Holder(torch.nn.Module):
    """Uses a buffer and a parameter that hold NaN twice, the buffer also in a part of the model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("c", torch.tensor([1.0, float("nan"), 0.0], dtype=dtype))
        self.p = torch.nn.Parameter(torch.tensor([[float("nan")], [2.0]]), requires_grad=False)
        self.part = torch.nn.BatchNorm1d(3)
        self.part.running_mean.fill_(float("nan"))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [(x + self.c).float(), (self.c * x).float(), torch.isnan(self.c).float() + x, x * self.p, x / self.p,
                torch.nan_to_num(self.p, 7.0) + x, torch.where(torch.isnan(self.c), x, x * 2), self.part(x)]


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_constants_that_hold_nan(frontend: str, precision: object) -> None:
    check(Holder().eval(), X, frontend=frontend, precision=precision)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_float64_constants_that_hold_nan(frontend: str) -> None:
    check(Holder(torch.float64).eval(), X, frontend=frontend)


class Twice(torch.nn.Module):
    """Reads a buffer, that a script may assign in between, in each branch of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.tensor([1.0, float("nan"), 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            y = x + self.c
        else:
            y = x - self.c * 2.0
        return y


def test_nan_of_the_branches_of_a_script() -> None:
    check(Twice().eval(), X, frontend="script", at=[[-X]])
