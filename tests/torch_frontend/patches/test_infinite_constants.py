"""Infinite numbers of traced, scripted and exported models."""

from __future__ import annotations

import math

import coremltools as ct
import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.tensor([[1.0, -2, 3, 0], [4, 5, -6, 7], [-1, -2, -3, -4]])
MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


def pool_masked(x: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    """The largest element of a row that is not masked; of the second row, all are."""
    y = x.masked_fill(m == 0, float("-inf")).amax(1)
    sums = torch.logsumexp(x.masked_fill(m == 0, float("-inf")), 1)
    return [torch.nan_to_num(y, neginf=0.0), y.isfinite().float(), (y > -1e38).float(), y,
            torch.where(y == float("-inf"), torch.zeros_like(y), y),
            torch.where(torch.isinf(sums), torch.full_like(sums, -20.0), sums)]


def make_infinite(x: torch.Tensor) -> list[torch.Tensor]:
    made = (torch.full((3, 4), -math.inf), x.new_full((3, 4), math.inf), torch.full_like(x, -math.inf))
    chosen = torch.where(x > 0, x, -math.inf)
    return [*(torch.isinf(each).float() for each in made), torch.isinf(chosen).float(), torch.clamp(x, -math.inf, 3.0),
            torch.exp(chosen), torch.softmax(torch.where(x > -4, x, -math.inf), 1), torch.isinf(x / 0.0).float()]


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_infinite_numbers_stay_infinite(frontend: str, precision: object) -> None:
    check(pool_masked, X, MASK, frontend=frontend, precision=precision)
    if frontend != "script":  # a script has no math.inf
        check(make_infinite, X, frontend=frontend, precision=precision)


def test_norms_of_infinite_order() -> None:
    check(lambda x: (torch.norm(x, math.inf, 1), torch.linalg.vector_norm(x, -math.inf, 1)), X)
