"""`where` of numbers; bitwise ops of bools and ints; shifts."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

X = torch.randn(2, 3)
NUMBERS = torch.tensor([[3, -1, 2], [0, 5, -7]], dtype=torch.int32)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_where_of_numbers(frontend: str) -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0.5) + torch.where(x > 0, 1.0, x) + torch.where(x[:, :1] > 0, x[:1], -2.0)

    check(choose, X, frontend=frontend)


def test_where_of_two_numbers_of_bools_and_of_single_values() -> None:
    check(lambda x: torch.where(x > 0, 1.0, 2.0) + x, X)
    check(lambda x: torch.where(x > 0, x > 1, x < -1).int(), X)
    check(lambda x: torch.where(x.sum() > 0, x.max(), x.min()) + x, X)
    check(lambda x: torch.where(x > 0, x, 1.5), NUMBERS)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_bools(frontend: str) -> None:
    def logic(x: torch.Tensor) -> torch.Tensor:
        return (((x > 0) | (x < -1)) ^ ((x > 1) & (x < 2))).int()

    check(logic, X, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_ints(frontend: str) -> None:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return (x & 3) + (x << 2) + (x >> 1)

    check(bits, NUMBERS, frontend=frontend)


@pytest.mark.parametrize(("function", "why"), [(lambda x: x | 4, "'or' of ints has no lowering"),
                                               (lambda x: x & 4, "known for constant masks")])
def test_other_patterns_are_refused(function, why: str) -> None:
    with pytest.raises(Exception, match=why):
        check(function, NUMBERS)
