"""repeat_interleave by constants, embedding_bag."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check

X = torch.rand(3, 4)
EACH = pytest.mark.parametrize("frontend", ["trace", "export"])


@EACH
def test_repeats(frontend: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_each = torch.repeat_interleave(x, torch.tensor([1, 0, 2, 3]), 1, output_size=6)
        return by_each, torch.repeat_interleave(x, 2, -1), torch.repeat_interleave(x > 0.5, 2).int()

    check(model, X, frontend=frontend)


def test_repeats_of_a_flexible_size() -> None:
    check(lambda x: torch.repeat_interleave(x, 2, 0), X, flexible=[0], at=[(torch.rand(7, 4),)])
    with pytest.raises(NotConverted, match="repeats for each element of a flexible size"):
        check(lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2]), 0), X, flexible=[0])


def test_repeats_that_the_model_computes_are_refused() -> None:
    with pytest.raises(NotConverted, match="the repeats are computed by the model"):
        check(lambda x, n: torch.repeat_interleave(x, n, 0), X, torch.tensor([1, 0, 2]))


@EACH
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, frontend: str) -> None:
    weight = torch.randn(5, 4)

    def model(i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        same = F.embedding_bag(i.reshape(3, 2), weight, mode=mode)
        return same, F.embedding_bag(i, weight, torch.tensor([0, 2, 2, 5]), mode=mode)

    check(model, torch.tensor([0, 1, 2, 0, 4, 4]), frontend=frontend)
