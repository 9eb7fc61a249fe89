"""Models that passes of coremltools convert wrongly, change or fail on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import nn

import mil_ane_passes as ane

from ..checks import captured, convert_captured, input_types, outputs

torch.manual_seed(0)
WEIGHT, BIAS, KERNEL, CHANNELS = torch.randn(4, 4), torch.randn(4), torch.randn(4, 4, 2, 2), torch.randn(8, 1, 1)
MATRIX, IMAGE = torch.randn(4, 4), torch.randn(1, 4, 6, 6)


def normalized(convolution: nn.Module, normalization: nn.Module) -> nn.Module:
    normalization.running_mean.normal_()
    normalization.running_var.uniform_(0.5, 2)
    return nn.Sequential(convolution, normalization).eval()


class Subtracted(nn.Module):
    """Two convolutions minus one buffer, which the model also returns as a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 2)
        self.register_buffer("mean", torch.randn(4, 1, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.first(x) - self.mean, self.second(x) - self.mean, x * self.mean


def pad_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inner = nn.functional.pad(x, (1, 1))
    return nn.functional.pad(inner, (0, 0, 1, 1)), inner


def subtract_chunks(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.stack([x, x.tanh()], 1).chunk(2, 1)
    return first - second


MODELS: dict[str, tuple[nn.Module | Callable[..., Any], torch.Tensor]] = {
    "W @ x + b": (lambda x: WEIGHT @ x + BIAS, MATRIX),
    "grouped transposed, normalized": (
        normalized(nn.ConvTranspose2d(4, 8, 2, groups=2), nn.BatchNorm2d(8)), IMAGE),
    "depthwise transposed, normalized": (
        normalized(nn.ConvTranspose1d(4, 8, 2, stride=2, groups=4, bias=False), nn.BatchNorm1d(8)),
        IMAGE[:, :, 0]),
    "grouped transposed, scaled": (lambda x: nn.functional.conv_transpose2d(x, KERNEL, groups=2) * CHANNELS, IMAGE),
    "grouped transposed, plus a number": (lambda x: nn.functional.conv_transpose2d(x, KERNEL, groups=2) + 2.0, IMAGE),
    "normalized without gamma": (normalized(nn.Conv2d(4, 8, 2), nn.BatchNorm2d(8, affine=False)), IMAGE),
    "minus a shared buffer": (Subtracted().eval(), IMAGE),
    "one channel times and plus channels": (lambda x: torch.tanh(x[:, :1] * CHANNELS + CHANNELS.flip(0)), IMAGE),
    "one channel plus channels": (lambda x: nn.functional.conv2d(x, KERNEL[:1]) + CHANNELS, IMAGE),
    "stack and chunk": (subtract_chunks, IMAGE),
    "a padding as output": (pad_twice, IMAGE),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_torch_and_the_module_is_unchanged(name: str, frontend: str) -> None:
    model, x = MODELS[name]
    expected = model(x)
    expected = [each.detach().clone() for each in (expected if isinstance(expected, tuple) else (expected,))]
    held = {key: value.clone() for key, value in model.state_dict().items()} if isinstance(model, nn.Module) else {}
    program = captured(model, [x], frontend)
    named = dict(inputs=None if frontend == "export" else input_types([x]), skip_model_load=True,
                 minimum_deployment_target=ct.target.iOS16, compute_precision=ct.precision.FLOAT32)
    for mlmodel in (ane.convert(program, check=True, **named), convert_captured(program, [x], frontend),
                    convert_captured(program, [x], frontend, pass_pipeline=ane.pipeline())):
        for found, wanted in zip(outputs(mlmodel, [x]), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(value, held[key]) for key, value in (model.state_dict() if held else {}).items())


@pytest.mark.parametrize("name", ["W @ x + b", "grouped transposed, scaled", "grouped transposed, normalized"])
def test_our_pipeline_alone_is_enough(name: str) -> None:
    model, x = MODELS[name]
    mlmodel = convert_captured(captured(model, [x], "trace"), [x], "trace", patched=False, pass_pipeline=ane.pipeline())
    np.testing.assert_allclose(outputs(mlmodel, [x])[0], model(x).detach(), rtol=1e-4, atol=1e-4)
