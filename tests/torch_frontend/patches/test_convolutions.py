"""Convolutions of all paddings, without a batch, and with computed weights and biases give the values of torch."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check, convert

FORMS = [
    (1, {"stride": 2, "output_padding": 1}),
    (1, {"stride": 3, "padding": 1, "output_padding": 2}),
    (1, {"stride": 2, "padding": 1, "output_padding": 1}),
    (1, {"stride": 1, "dilation": 4, "output_padding": 3}),
    (2, {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 2, "dilation": (1, 2)}),
    (2, {"stride": 3, "padding": 2, "output_padding": (0, 2), "bias": False}),
    (2, {"stride": 3, "padding": (0, 1), "output_padding": (1, 0)}),
    (3, {"stride": (1, 2, 3), "padding": 1, "output_padding": (0, 1, 2)}),
    (3, {"stride": 2, "padding": 1, "output_padding": 1}),
    (3, {"stride": 2, "padding": 1}),
]


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize(("rank", "form"), FORMS)
def test_the_output_is_as_large_as_that_of_torch(rank: int, form: dict[str, Any], frontend: str) -> None:
    torch.manual_seed(3)
    layer = getattr(torch.nn, f"ConvTranspose{rank}d")(4, 6, 3, **form).eval().requires_grad_(False)
    check(layer, torch.randn(2, 4, *(5, 4, 3)[:rank]), frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export", "script"])
@pytest.mark.parametrize("layer", [
    torch.nn.Conv1d(4, 6, 3, padding=1), torch.nn.Conv1d(4, 6, 3, padding="same"),
    torch.nn.Conv2d(4, 6, 3, padding="same"), torch.nn.Conv3d(4, 6, 2),
    torch.nn.ConvTranspose1d(4, 6, 2, stride=2), torch.nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1),
    torch.nn.ConvTranspose2d(4, 6, 2, 2), torch.nn.ConvTranspose3d(4, 6, 2)])
def test_a_value_without_a_batch_keeps_its_rank(layer: torch.nn.Module, frontend: str) -> None:
    """The number of channels is also that of a spatial axis: the axes must not be read as a batch and channels."""
    rank = int(type(layer).__name__[-2])
    check(layer.eval().requires_grad_(False), torch.randn(4, *(4, 5, 3)[:rank]), frontend=frontend)


class Dynamic(torch.nn.Module):
    """Convolutions of `rank` dimensions whose weight and bias, or bias alone, are computed."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("weight", torch.randn(2, 2, *[2] * rank, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bias = p[:, -2:].reshape(-1)
        call = getattr(torch.nn.functional, f"conv{self.rank}d")
        weight = p[:, :4 * 2**self.rank].reshape([2, 2] + [2] * self.rank)
        return call(x[:, :2], weight, bias), call(x, self.weight, bias * 2, groups=2), call(
            x[:, :2], weight, bias, padding="same")


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_computed_weights_and_biases(rank: int, frontend: str, target: ct.target) -> None:
    """As in dynamic convolutions (CondInst), with constant weights beside a computed bias, and in groups."""
    check(Dynamic(rank).eval(), torch.randn(1, 4, *(5, 4, 3)[:rank]), torch.randn(1, 4 * 2**rank + 2),
          frontend=frontend, target=target)


def test_a_computed_weight_of_a_transposed_convolution_needs_ios17() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv_transpose2d(x, weight * 2)

    feeds = torch.randn(1, 4, 5, 5), torch.randn(4, 2, 2, 2)
    check(model, *feeds, target=ct.target.iOS17)
    with pytest.raises(NotConverted, match="expected a constant before iOS17: convert with minimum_deployment_target"):
        convert(model, feeds, target=ct.target.iOS16)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_transposed_convolution_with_a_computed_bias(rank: int, frontend: str) -> None:
    weight = torch.randn(4, 2, *(3, 2, 2)[:rank], generator=torch.Generator().manual_seed(1))

    class Shifted(torch.nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
            call = getattr(torch.nn.functional, f"conv_transpose{rank}d")
            padded = call(x, weight, bias=bias, padding=1, output_padding=1, stride=2)
            return call(x, weight, bias * 2, stride=2), padded

    check(Shifted().eval(), torch.randn(2, 4, *(5, 4, 3)[:rank]), torch.randn(2), frontend=frontend)
