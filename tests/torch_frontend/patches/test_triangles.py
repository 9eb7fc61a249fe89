"""`triu` and `tril` with a diagonal that the model computes; constant ones are in the grid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ..checks import check


def _hide_later_keys(x: torch.Tensor) -> torch.Tensor:
    q = x[:, 4:]
    shown = torch.ones(q.shape[1], x.shape[1], dtype=torch.bool).tril(diagonal=x.shape[1] - q.shape[1])
    return (q @ x.mT).masked_fill(~shown, float("-inf")).softmax(-1) @ x


def _add_mask(x: torch.Tensor) -> torch.Tensor:
    q = x[:, 4:]
    count, total = q.shape[1], x.shape[1]
    return (q @ x.mT + torch.full((count, total), float("-inf")).triu(total - count + 1)).softmax(-1) @ x


MODELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bools": _hide_later_keys,
    "infinity": _add_mask,
    "a value": lambda x: torch.tril(x @ x.mT, x.shape[1] - 5),
    "a fixed size": lambda x: torch.triu(torch.ones(4, 4) * x.sum(), x.shape[1] - 6),
}


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("name", MODELS)
def test_a_computed_diagonal(name: str, frontend: str) -> None:
    """The causal mask of a chunk of tokens behind a cache."""
    check(MODELS[name], torch.randn(1, 9, 8), flexible=[1], frontend=frontend, lowest=6,
          at=[[torch.randn(1, count, 8)] for count in (6, 14)], atol=1e-4)
