"""Torch layers as coremltools converts them, saved and loaded, held against the layer itself in double precision."""

from __future__ import annotations

import numpy as np
import torch

from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import WAYS
from tests.rewrites.helpers import converted_as, half, torch_outputs

__all__ = ["WAYS", "BehindRelu", "built", "converted", "distance", "draw"]


class BehindRelu(torch.nn.Module):
    """A layer whose input is computed."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.nn.functional.relu(x))


def converted(layer, shape, way, tmp_path, **settings):
    """The program of the package of `layer`, saved and loaded; `settings` are those of `converted_as`."""
    return converted_as(half(layer.float().eval()), torch.zeros(shape), way, tmp_path / "m.mlpackage", **settings)


def built(body, layer, shape):
    """A program of `body(x, weight, bias)` in fp16, and the layer with its weights rounded to it."""
    half(layer)
    bias = None if layer.bias is None else layer.bias.detach().numpy().astype(np.float16)
    weight = layer.weight.detach().numpy().astype(np.float16)
    return build_program(lambda x: body(x, weight, bias), x=shape)


def draw(shape, seed=0):
    """Numbers that fp16 has."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16).astype(np.float32)


def distance(program_, layer, shape, precision="float64", quirks=()):
    """How far the program is from the layer in double precision, as a share of the layer's largest output."""
    x = draw(shape)
    (name,) = program_.functions["main"].inputs
    (found,) = Runtime(program_, precision=precision, quirks=list(quirks))({name: x}).values()
    expected = torch_outputs(layer, torch.from_numpy(x))
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())
