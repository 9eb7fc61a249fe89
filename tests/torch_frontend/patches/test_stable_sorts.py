"""Sorts that keep the order of equal elements, whatever the order in which argsort returns them."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

from mil_ane_passes.runtime.ops import tensor_operation
from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check, convert, outputs

torch.manual_seed(0)
TIES = torch.randn(3, 40).round()


def values_and_indices(x: torch.Tensor):
    return torch.sort(x, dim=-1, stable=True)


def descending(x: torch.Tensor):
    return torch.sort(x, stable=True, descending=True)


def first_axis(x: torch.Tensor):
    return torch.argsort(x, dim=0, stable=True)


def of_last_axis_descending(x: torch.Tensor):
    return torch.argsort(x, dim=-1, descending=True, stable=True)


def of_a_vector(x: torch.Tensor):
    return x[0].sort(stable=True)


def of_bools(x: torch.Tensor):
    found = torch.sort(x > 0, dim=1, stable=True)
    return found[0].int(), found[1]


def of_one_element(x: torch.Tensor):
    return x[:, :1].sort(dim=1, stable=True)


@pytest.fixture
def unstable(monkeypatch):
    """A runtime whose argsort returns equal elements in reverse."""
    stable = tensor_operation._sort_indices
    monkeypatch.setattr(tensor_operation, "_sort_indices", lambda x, axis, ascending: (
        x.shape[axis] - 1 - stable(x.flip(axis), axis, ascending)))


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [values_and_indices, descending, first_axis, of_last_axis_descending, of_a_vector,
                                      of_bools, of_one_element])
def test_equal_elements_keep_their_order(function, frontend: str, unstable) -> None:
    check(function, TIES, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_of_integers_and_flexible_sizes(frontend: str, unstable) -> None:
    with pytest.raises(AssertionError):
        check(lambda x: torch.sort(x)[1], TIES)
    check(values_and_indices, TIES.int(), frontend=frontend)
    check(values_and_indices, TIES, frontend=frontend, flexible=(0, 1), at=[[TIES[:2, :7]], [TIES.repeat(2, 1)[:, :2]]])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_without_a_stable_order_there_is_one_sort(frontend: str) -> None:
    def function(x: torch.Tensor):
        return torch.sort(x, dim=1, descending=True, stable=False)[0]

    program = check(function, TIES, frontend=frontend)._mil_program
    assert len(program.functions["main"].find_ops(op_type="argsort")) == 1


def test_results_are_integers() -> None:
    _, indices = outputs(convert(values_and_indices, [TIES]), [TIES])
    assert indices.dtype == np.int32


def test_too_many_elements_are_refused() -> None:
    with pytest.raises(NotConverted, match=r"test_stable_sorts.py:\d+\): sorts 40,000 elements in a stable order; "
                                           r"at most 32,768 are supported; sort without stable=True"):
        check(values_and_indices, torch.zeros(1, 40000))


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_the_largest_elements_in_any_order(frontend: str, target) -> None:
    def function(x: torch.Tensor):
        return torch.topk(x, 3, -1, sorted=False)[0].sum(-1), x.topk(2, 0, largest=False, sorted=False)[0].sum(0)

    check(function, torch.randn(4, 8), frontend=frontend, target=target)
