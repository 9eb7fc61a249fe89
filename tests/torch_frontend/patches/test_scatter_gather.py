"""`gather`, `scatter`, `scatter_add`, `scatter_reduce`, `index_select`, and const indices."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check, convert

X = torch.arange(24.0).reshape(2, 4, 3)
INDEX = torch.tensor([[[0, 3, 2], [1, 1, 0]]])
EACH = pytest.mark.parametrize("frontend", FRONTENDS)


@EACH
def test_gather(frontend: str) -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.gather(x, 1, index) + torch.gather(x > 5, -2, index).float()

    check(function, X, INDEX, frontend=frontend)
    check(function, X, INDEX.repeat(2, 1, 1), frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_const_indices(frontend: str, target: object) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        gathered = torch.gather(x, 1, INDEX) + x[:1, [0, 2]] + x[:1, [-1, 1]] + x[[0], :2]
        chosen = torch.index_select(x, 1, torch.tensor([0, 2])) + torch.index_select(x, 1, torch.tensor(3))
        return torch.cat([gathered, chosen, x[[0, -1], [2, 3]].unsqueeze(0).repeat(1, 1, 1)])

    check(function, X, frontend=frontend, target=target)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_scatter_of_a_number(frontend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        ints = torch.scatter(x.int(), 2, INDEX[:, :, :1], 7)
        return torch.scatter(x, 1, INDEX, 5) + torch.scatter(x, 1, INDEX, 2.5, reduce="add") + ints

    check(function, X, frontend=frontend)


@EACH
def test_scatter_of_a_tensor(frontend: str) -> None:
    def function(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.scatter(x, 1, index, source), torch.scatter_add(x, 1, index, source),
                          torch.scatter_reduce(x, 1, index, source, "amax")])

    check(function, X, INDEX, X * 2 - 20, frontend=frontend)


def test_scatter_of_bools() -> None:
    check(lambda x: torch.scatter(x > 100, 1, INDEX, x > 5).float(), X)


def test_flexible_batch() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        order = x.argsort(1, descending=True)
        return torch.gather(x, 1, order) + torch.scatter(x, 1, order, 3)

    check(function, X, flexible=(0,), at=[[torch.arange(60.0).reshape(5, 4, 3)]])


def test_fixed_index_of_flexible_data() -> None:
    more = torch.arange(60.0).reshape(5, 4, 3)
    check(lambda x: torch.gather(x, 1, INDEX), X, flexible=(0,), at=[[more]])
    with pytest.raises(NotConverted, match="smaller than the data"):
        convert(lambda x: torch.scatter(x, 1, INDEX, 3), (X,), flexible=(0,))


def test_computed_index_of_rank_0() -> None:
    check(lambda x: torch.index_select(x, 1, x[0, 0, :].argmax()), X)


def test_refusal() -> None:
    with pytest.raises(NotConverted, match="include_self"):
        convert(lambda x: torch.scatter_reduce(x, 1, INDEX, x, "sum", include_self=False), (X,))


def test_a_source_larger_than_the_index() -> None:
    index = torch.tensor([[0, 1]])
    check(lambda x, i: torch.zeros(2, 4).scatter_add(1, i, x), X[0, :, :], index)
    check(lambda x, i: torch.zeros(2, 4).scatter_add(1, i, x), X[0, :, :], index, flexible=[0, 1],
          at=[(torch.rand(2, 2), index)])
    check(lambda x: torch.zeros(4, 3).scatter_add(1, (x[:, :2] > 9).long(), x), X[0], flexible=[1],
          at=[(torch.rand(4, 7) * 20,)])


def test_gathering_along_a_flexible_size_by_fewer() -> None:
    check(lambda x, y: torch.gather(x, 1, (y[:, :2] * 0 + 1).long()), X[0], X[0, :2], flexible=[0],
          at=[(torch.rand(7, 3), X[0, :2])])
