"""`einsum` of one operand, with an ellipsis, without a result, and of sizes that broadcast."""

from __future__ import annotations

import linecache
import types

import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check

torch.manual_seed(0)

X, Y, SQUARE, ROW = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randn(4, 4), torch.randn(4)
ONE = ["...ij->...ji", "...ij", "...ij->...", "...ii->...i", "...ii->...", "i...->...i", "i...j->j...i", "...->...",
       "a...ii->a...i", "...ij->ij", "...ij->ji...", "abcd->dbca", "...->", "ijkl->"]
ONE_OF_A_MATRIX = ["ba", "ii", "ii->", "ij->", "ij->j", "Ab", " i j -> j i ", "ij->ij", "...ij->...ji"]
SEVERAL = [
    ("...ij,...jk->...ik", X, Y), ("i...,i...->...", X, Y), ("...d,...d->...", X, Y), ("...ij,jk->...ik", X, SQUARE),
    ("...i,...j->...ij", X[0], Y[0]), ("...,...->...", X, SQUARE), ("...,f->...f", ROW, ROW), ("i,j", ROW, ROW),
    ("...ij,...ij->", X, Y), ("...ij,ij", X, SQUARE), ("b...ij,...j->...bi", X, ROW),
    ("ij,jk,kl->li", SQUARE, SQUARE, SQUARE), ("...i,...i", X, X[:, :1]), ("bhij,bhjk->bhik", X, X[:1]),
    ("ij,ij->ij", SQUARE, ROW[None]),
]


def make_function(equation: str, count: int):
    """A function with source, as scripts need one: `einsum` of `count` tensors."""
    names = ", ".join("xyz"[:count])
    arguments = ", ".join(f"{each}: torch.Tensor" for each in "xyz"[:count])
    source = f"def function({arguments}):\n    return torch.einsum({equation!r}, {names}) * 1\n"
    path = f"<einsum {equation} {count}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = types.ModuleType("einsum_of_one")
    module.torch = torch
    exec(compile(source, path, "exec"), module.__dict__)
    return module.function


@pytest.mark.sampled(16)
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("equation", "tensors"), [*((each, (X,)) for each in ONE),
                                                   *((each, (SQUARE,)) for each in ONE_OF_A_MATRIX),
                                                   *((equation, tensors) for equation, *tensors in SEVERAL)])
def test_values_are_those_of_pytorch(equation: str, tensors, frontend: str) -> None:
    check(make_function(equation, len(tensors)), *tensors, frontend=frontend)


@pytest.mark.parametrize("equation", ["...ij->...ji", "...ij->...", "...ii->...i", "i...->...i"])
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_of_flexible_sizes(equation: str, frontend: str) -> None:
    check(lambda x: torch.einsum(equation, x) + 1, X, frontend=frontend, flexible=(0, 1),
          at=[[torch.randn(5, 2, 4, 4)]])
    check(lambda x: torch.einsum("...d,...d->...", x, x + 1), X, frontend=frontend, flexible=(0, 1),
          at=[[torch.randn(5, 2, 4, 4)]])


@pytest.mark.parametrize("equation", ["...ij->...ji", "...ij->...i", "...ii->...i"])
def test_of_integers_and_bools(equation: str) -> None:
    check(lambda x: torch.einsum(equation, x) * 2, (X * 3).int())
    check(lambda x: torch.einsum(equation, x > 0).int(), X)


def test_a_number_of_axes_that_does_not_fit_is_refused() -> None:
    scripted = make_function("...ij,jk->ik", 2)
    with pytest.raises(NotConverted, match=r"'\.\.\.ij,jk->ik' does not fit an operand of rank 1"):
        check(scripted, SQUARE, ROW, frontend="script")
