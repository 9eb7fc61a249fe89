"""cummax and cummin."""

from __future__ import annotations

import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check

X = torch.tensor([[3.0, 1.0, 3.0, 5.0, 2.0], [-1.0, -2.0, -2.0, 0.0, 0.0]])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_values_and_places(frontend: str) -> None:
    def model(x: torch.Tensor):
        largest, at = torch.cummax(x, 1)
        least, below = torch.cummin(x.int(), 0)
        return largest, at, least, below

    check(model, X, frontend=frontend)


def test_a_flexible_batch() -> None:
    check(lambda x: torch.cummin(x, -1)[1], X, flexible=[0], at=[(torch.rand(7, 5),)])


def test_a_flexible_dimension_is_refused() -> None:
    with pytest.raises(NotConverted, match="takes a dimension of known size; fix the size"):
        check(lambda x: torch.cummax(x, 1)[0], X, flexible=[1])
