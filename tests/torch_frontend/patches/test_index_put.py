"""Assignment at indices and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check, convert

X = torch.arange(60.).reshape(3, 4, 5) - 30


def put(indices: Callable[..., Any], values: Callable[..., Any], accumulate: bool = False) -> Callable[..., Any]:
    def write(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put(x, indices(x, *given), values(x, *given), accumulate)

    return write


CASES = {
    "rows": put(lambda x: [torch.tensor([2, 0])], lambda x: x[:2] * 2),
    "last axis": put(lambda x: [None, None, torch.tensor([1, 3])], lambda x: x[..., :2] + 9),
    "many indices": put(lambda x: [None, None, torch.arange(20) % 5], lambda x: torch.ones(20)),
    "two axes, apart": put(lambda x: [torch.tensor([0, 2]), None, torch.tensor([1, 3])], lambda x: x[:2, :, 0] - 5),
    "two axes, side by side": put(lambda x: [None, torch.tensor([[0], [3]]), torch.tensor([[1, 2]])],
                                  lambda x: torch.full((3, 2, 2), 4.)),
    "one place": put(lambda x: [torch.tensor([1]), None, torch.tensor([-1])], lambda x: torch.arange(4.)),
    "duplicates add up": put(lambda x: [torch.tensor([0, 0, 2])], lambda x: x * 2, accumulate=True),
    "negative": put(lambda x: [None, torch.tensor([-1, -3])], lambda x: torch.tensor(3.)),
    "accumulate one value": put(lambda x: [None, torch.tensor([1, 2])], lambda x: torch.tensor(3.), accumulate=True),
    "mask of all": put(lambda x: [x > 3], lambda x: torch.tensor(0.)),
    "mask of rows": put(lambda x: [x[:, :, 0] > 0], lambda x: torch.arange(5.)),
    "mask in the middle": put(lambda x: [None, x[0, :, 0] > -25], lambda x: torch.tensor(1.), accumulate=True),
    "mask with values in turn": put(lambda x: [x > 3], lambda x: (x * 10)[x > 3]),
    "mask and index": put(lambda x: [x[:, 0, 0] > -20, torch.tensor(2)], lambda x: torch.tensor(8.)),
    "nothing": put(lambda x: [torch.zeros(0, dtype=torch.int64)], lambda x: torch.tensor(1.)),
}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, target: Any) -> None:
    check(CASES[name], X, target=target)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_exported(name: str) -> None:
    check(CASES[name], X, frontend="export")


@pytest.mark.parametrize("name", ["rows", "last axis", "one place", "mask of all", "mask of rows", "negative"])
def test_no_scatter_where_the_indices_are_known(name: str) -> None:
    kinds = {op.op_type for op in convert(CASES[name], [X])._mil_program.functions["main"].operations}
    assert not {kind for kind in kinds if "scatter" in kind or "gather" in kind or kind == "non_zero"}, kinds


@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
def test_indices_the_model_is_given(target: Any) -> None:
    one = put(lambda x, i: [None, i], lambda x, i: torch.tensor(7.))
    rows = put(lambda x, i: [i], lambda x, i: x[:2] * 3, accumulate=True)
    pair = put(lambda x, i: [i, None, i], lambda x, i: torch.ones(2, 4))
    for function in (one, rows, pair):
        others = [[X, torch.tensor([2, 1])], [X, torch.tensor([-1, 0])]]
        check(function, X, torch.tensor([0, 2]), target=target, at=others)


@pytest.mark.parametrize("function, at", [
    (put(lambda x: [x > 0.5], lambda x: torch.tensor(0.)), (0, 2)),
    (put(lambda x: [None, torch.tensor([0, 3])], lambda x: torch.tensor(1.)), (0, 2)),
    (put(lambda x: [None, None, torch.tensor([0, -1])], lambda x: torch.tensor(1.)), (0, 2)),
])
def test_flexible_sizes(function: Callable[..., Any], at: tuple[int, ...]) -> None:
    for frontend in ("trace", "export"):
        check(function, X, frontend=frontend, flexible=at, at=[[torch.arange(32.).reshape(2, 4, 4)]])


def test_masks_of_ints_and_bools() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        counts = x.to(torch.int64)
        counts[counts > 3] = 0
        flags = x > 0
        flags[torch.tensor([0, 2])] = True
        return counts + flags * 1.0

    for frontend in ("trace", "export"):
        check(write, X, frontend=frontend)


def test_bools_do_not_add_up() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put(x > 0, [torch.tensor([0])], torch.tensor(True), True) * 1.0

    with pytest.raises(NotConverted, match="accumulates into bools"):
        convert(write, [X])
