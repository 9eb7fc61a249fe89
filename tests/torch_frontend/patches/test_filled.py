"""`zeros`, `ones`, `full`, `new_*`, `*_like`, `fill_`, `zero_`."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check

NUMBERS = torch.tensor([[3, -1, 2], [0, 5, 7]], dtype=torch.int32)


def new(x: torch.Tensor) -> torch.Tensor:
    return x / x.new_ones((2, 3)) + x.new_full((2, 3), 3) / 2 + x.new_zeros([3]) + x.new_ones((1,), dtype=torch.float32)


def like(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(x) + torch.full_like(x, 3) // 2 + torch.zeros_like(x, dtype=torch.float32)
    return ones + torch.full_like(x, 0.5, dtype=torch.float32) + x


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [new, like])
def test_dtype_is_kept(function, frontend: str) -> None:
    check(function, NUMBERS, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_zero_and_fill(frontend: str) -> None:
    def cleared(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).zero_() + (x * 2).fill_(2) + torch.full((3,), 2) / 4

    check(cleared, NUMBERS, frontend=frontend)


def test_computed_value() -> None:
    check(lambda x: (x + 1).fill_(x.sum()) + x, torch.randn(2, 3))


def test_sizes_of_a_flexible_input() -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones((x.shape[0], 3)) + torch.full_like(x, 2.5) + torch.zeros(x.size(0), 1) + x

    check(made, torch.randn(4, 3), flexible=[0], at=[(torch.randn(2, 3),), (torch.randn(64, 3),)])


def test_known_sizes_become_consts() -> None:
    mlmodel = check(lambda x: torch.full_like(x, 2.0) * x + x.new_ones(x.shape), torch.randn(2, 3))
    kinds = {op.op_type for op in mlmodel._mil_program.functions["main"].operations}
    assert not kinds & {"fill", "fill_like", "shape"}
