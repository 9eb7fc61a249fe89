"""Text arguments of exported ops are text, also where a value has that name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from ..checks import check

PLACES = torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2]])
X = torch.linspace(-4.3, 5.1, 8).reshape(2, 4)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("model", [
    lambda x: functional.gelu(x.tanh() * 3, approximate="tanh"),
    lambda x: torch.div(x.floor(), 1.7, rounding_mode="floor"),
    lambda x: torch.div(x.trunc(), 1.7, rounding_mode="trunc"),
    lambda x: x.scatter_reduce(1, PLACES, x.amax(1, keepdim=True).expand(2, 4), reduce="amax"),
], ids=["gelu", "floor", "trunc", "scatter"])
def test_a_text_is_not_the_op_of_that_name(model: Callable[[torch.Tensor], torch.Tensor], frontend: str) -> None:
    check(model, X, frontend=frontend)


class OfAnInput(torch.nn.Module):
    def forward(self, floor: torch.Tensor) -> torch.Tensor:
        return torch.div(floor, 1.7, rounding_mode="floor") + torch.div(floor * 2, 1.3, rounding_mode="trunc")


def test_a_text_is_not_the_input_of_that_name() -> None:
    check(OfAnInput().eval(), X, frontend="export")
