"""Clamps between numbers, tensors and bounds that cross give the values and the dtype of torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ..checks import check, convert, outputs

X = torch.tensor([[-3.0, -1.0, 0.0, 2.0], [1.0, 5.0, -4.0, 0.5]])
LOW = torch.tensor([[1.0, -2.0, -1.0, 3.0], [0.0, 6.0, -5.0, 0.25]])
HIGH = torch.tensor([0.0, 1.0, -2.0, 4.0])
LARGE = torch.tensor([16777217, -3, 5, 16777219], dtype=torch.int32)

CASES: list[tuple[str, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = [
    ("bounds that cross", lambda x, low, high: x.clamp(low, high), (X, LOW, HIGH)),
    ("constant bounds that cross", lambda x: x.clamp(LOW, HIGH), (X,)),
    ("a lower bound", lambda x, low: x.clamp(min=low), (X, LOW)),
    ("an upper bound of more axes", lambda x, high: x[0].clamp(max=high), (X, LOW)),
    ("constant bounds of ints", lambda x: x.clamp(torch.tensor([1, -2, 0, 9]), torch.tensor([3])), (X,)),
    ("numbers", lambda x: x.clamp(-1, 2.5) + x.clamp(min=0) + torch.clip(x, max=1), (X,)),
    ("numbers that cross", lambda x: x.clamp(2, -1), (X,)),
    ("one bound of a number", lambda x: x.clamp_min(0) + x.clamp_max(1) + torch.clamp_min(x, 0.5), (X,)),
    ("one bound of a tensor", lambda x, low: torch.clamp_max(x, low) * torch.clamp_min(x, low), (X, LOW)),
]


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize(("function", "example"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_values_are_those_of_torch(function: Callable[..., torch.Tensor], example: tuple[torch.Tensor, ...],
                                   frontend: str) -> None:
    check(function, *example, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("function", [lambda x: x.clamp(min=0), lambda x: x.clamp(max=16777218),
                                      lambda x: x.clamp(1, 16777218), lambda x: x.clamp_min(0)])
def test_ints_stay_ints(function: Callable[[torch.Tensor], torch.Tensor], frontend: str) -> None:
    found, = outputs(convert(function, [LARGE], frontend), [LARGE])
    assert found.dtype == np.int32
    assert found.tolist() == function(LARGE).tolist()


def test_ints_between_fractions_are_floats() -> None:
    check(lambda x: x.clamp(0.5, 3.5), torch.tensor([0, 2, 9], dtype=torch.int32))
