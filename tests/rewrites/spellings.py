"""Torch functions as coremltools converts them: traced, exported, decomposed; saved and loaded."""

from __future__ import annotations

import coremltools as ct
import numpy as np

import mil_ane_passes as ane
from mil_ane_passes.runtime import Runtime

WAYS = ("traced", "exported", "decomposed")


def spelt(function):
    """A torch module that is `function` of its one input."""
    import torch

    class Spelt(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return Spelt()


def converted(function, way, tmp_path, *, passes=None, precision="FLOAT16", target="iOS17", shape=(2, 8, 4)):
    """The program of the saved package, after the host's own passes; ours at their place where `passes` names some.

    "exported" goes through `run_decompositions({})`, which keeps torch's ops, "decomposed" through
    `run_decompositions()`, which takes them apart.
    """
    import torch

    module = spelt(function).eval()
    x = torch.randn(shape)
    settings = {}
    if way == "traced":
        model = torch.jit.trace(module, x)
        settings["inputs"] = [ct.TensorType(name="x", shape=shape)]
    else:
        exported = torch.export.export(module, (x,))
        model = exported.run_decompositions({}) if way == "exported" else exported.run_decompositions()
    made = ct.convert(model, convert_to="mlprogram", compute_precision=getattr(ct.precision, precision),
                      minimum_deployment_target=getattr(ct.target, target), skip_model_load=True,
                      pass_pipeline=ct.PassPipeline.DEFAULT if passes is None else ane.pipeline(passes=passes),
                      **settings)
    path = tmp_path / f"{way}.mlpackage"
    made.save(str(path))
    return ane.load(path).program


def outputs(program, x, precision, quirks=()):
    """The only output for the only input, as float64."""
    (name,) = program.functions["main"].inputs
    (found,) = Runtime(program, precision=precision, quirks=list(quirks))({name: x.astype(np.float32)}).values()
    return found.astype(np.float64)


def truth(function, x):
    """PyTorch's own result in double precision."""
    import torch

    with torch.no_grad():
        return function(torch.from_numpy(x.astype(np.float64))).numpy()


def grid(shape=(2, 8, 4), reach=45.0, seed=0):
    """Numbers that fp16 has, from -reach to reach, each once and in no order."""
    count = int(np.prod(shape))
    values = np.linspace(-reach, reach, count).astype(np.float16).astype(np.float32)
    return np.random.default_rng(seed).permutation(values).reshape(shape)
