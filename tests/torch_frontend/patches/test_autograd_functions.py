"""Custom autograd functions in traced modules."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch_frontend.checks import check  # noqa: E402


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        context.save_for_backward(x)
        return x * torch.sigmoid(x * slope)


class Parts(torch.autograd.Function):
    """Two outputs, two tensors, and another function inside."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Swish.apply(x - y, 3.0), x * y


class Clamped(torch.autograd.Function):
    """Writes in place."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.mark_dirty(x)
        return x.clamp_(-0.5, 0.5)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Swish.apply(self.layer(x), 2.0) + 1


X, Y = torch.linspace(-2, 2, 12).reshape(3, 4), torch.linspace(1, -1, 4)


@pytest.mark.parametrize("flexible", [(), (0,)])
def test_a_function_between_layers_is_what_its_forward_does(flexible):
    check(Gated().eval(), X, flexible=flexible)


def test_two_outputs_and_a_function_inside_a_function():
    check(lambda x, y: Parts.apply(x, y), X, Y)


def test_the_same_function_twice_on_the_input_itself():
    check(lambda x: Swish.apply(Swish.apply(x, 1.0), 0.5), X)


def test_a_function_that_writes_in_place():
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        Clamped.apply(y)
        return y + 1

    check(model, X)
