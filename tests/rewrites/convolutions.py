"""Torch layers as coremltools converts them, saved and loaded, held against the layer itself in double precision."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import torch

import mil_ane_passes as ane
from mil_ane_passes.core.examples import program
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import half, torch_outputs

WAYS = ("traced", "exported", "decomposed")


def converted(layer, shape, way, tmp_path, *, passes=None, precision="FLOAT16", target="iOS17"):
    """The program of the saved package, after the host's passes; ours at their place where `passes` names some."""
    layer, x, settings = half(layer.float().eval()), torch.zeros(shape), {}
    if way == "traced":
        model = torch.jit.trace(layer, x)
        settings["inputs"] = [ct.TensorType(name="x", shape=shape)]
    else:
        model = torch.export.export(layer, (x,))
        model = model.run_decompositions({}) if way == "exported" else model.run_decompositions()
    made = ct.convert(model, convert_to="mlprogram", compute_precision=getattr(ct.precision, precision),
                      minimum_deployment_target=getattr(ct.target, target), skip_model_load=True,
                      pass_pipeline=ct.PassPipeline.DEFAULT if passes is None else ane.pipeline(passes=passes),
                      **settings)
    made.save(str(tmp_path / "m.mlpackage"))
    return ane.load(tmp_path / "m.mlpackage").program


def built(body, layer, shape):
    """A program of `body(x, weight, bias)` in fp16, and the layer with its weights rounded to it."""
    half(layer)
    bias = None if layer.bias is None else layer.bias.detach().numpy().astype(np.float16)
    weight = layer.weight.detach().numpy().astype(np.float16)
    return program(lambda x: body(x, weight, bias), x=shape)


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
