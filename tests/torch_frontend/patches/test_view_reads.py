"""diagonal, narrow, unbind."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check, convert

X = torch.arange(60.).reshape(3, 4, 5)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
@pytest.mark.parametrize("offset, first, second", [(0, 0, 1), (1, -2, -1), (-2, 1, 2), (2, 2, 0), (4, 1, 2)])
def test_diagonal(offset: int, first: int, second: int, target: Any) -> None:
    check(lambda x: x.diagonal(offset, first, second) + 1, X, target=target)


def test_diagonal_of_ints_and_bools() -> None:
    check(lambda x: x.to(torch.int64).diagonal() + (x > 10).diagonal() * 1.0, X)


def test_diagonal_of_flexible_sizes() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(0) * x.unsqueeze(1)).diagonal() + 0

    check(square, torch.arange(5.), flexible=(0,), at=[[torch.arange(3.)]])
    with pytest.raises(NotConverted, match="flexible sizes that differ"):
        convert(lambda x: x.diagonal(1) + 0, [torch.ones(4, 5)], flexible=(0, 1))


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.narrow(1, 1, 2) * 2, x.narrow(-1, -2, 2) + 1, x.unbind(1)[2] * 3]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_narrow_and_unbind(frontend: str) -> None:
    check(parts, X, frontend=frontend)
    if frontend != "script":
        check(parts, X, frontend=frontend, flexible=(0, 2), at=[[torch.arange(48.).reshape(4, 4, 3)]], lowest=3)


def test_unbind_of_a_flexible_axis_is_refused() -> None:
    with pytest.raises(NotConverted, match="unbinds an axis of flexible size"):
        convert(lambda x: x.unbind(0)[0] * 1, [torch.ones(4, 5)], flexible=(0,))


class Computed(torch.nn.Module):
    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, int(start), 2) * 1


def test_narrow_from_a_computed_start() -> None:
    check(Computed(), X, torch.tensor([1]), frontend="script", at=[[X, torch.tensor([2])]])
