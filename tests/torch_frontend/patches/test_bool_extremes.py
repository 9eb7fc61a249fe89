"""Extremes of bools are those of torch."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check


def of_bools(x: torch.Tensor):
    one, other = x > 0, x > 0.5
    return (one.max(), other.min(), one.amax(1).int(), one.amin(2, keepdim=True), torch.maximum(one, other),
            torch.minimum(one, ~other), torch.max(one, other), torch.min(one, other))


def of_bools_along_a_dimension(x: torch.Tensor):
    return (x > 0).max(1)[0], (x > 0).min(2, keepdim=True)[0].float()


def of_bools_and_numbers(x: torch.Tensor):
    return torch.maximum(x > 0, x), torch.minimum(x, x > 0.5), x.max(), x.amax(1), x.max(1)[1]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [of_bools, of_bools_along_a_dimension, of_bools_and_numbers])
def test_extremes_are_those_of_torch(function, frontend):
    check(function, torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)), frontend=frontend)


def test_truth_of_all_and_of_any():
    def tell(x):
        return x + torch.ops.aten._is_all_true(x > -9), x - torch.ops.aten._is_any_true(x > 9).float()

    check(tell, torch.randn(2, 3, 4), frontend="export")


def test_checks_of_exported_programs_are_left_out():
    """As `torch_compilable_check` of transformers, of which assertions alone read the result."""
    def scale(x, factors):
        torch._check_tensor_all(factors >= 0)
        return x * factors

    check(scale, torch.randn(2, 3), torch.ones(2, 3), frontend="export")


def test_a_mask_of_a_flexible_sequence_is_reduced():
    check(lambda x: x * (x > 0).amax(1, keepdim=True), torch.randn(2, 3, 4), flexible=[1], at=[(torch.randn(2, 7, 4),)])
