"""Torch functions as coremltools converts them: traced, exported, decomposed; saved and loaded."""

from __future__ import annotations

import numpy as np

from mil_ane_passes.runtime import Runtime
from tests.conversions import WAYS
from tests.rewrites.helpers import converted_as

__all__ = ["WAYS", "converted", "grid", "outputs", "spelt", "truth"]


def spelt(function):
    """A torch module that is `function` of its one input."""
    import torch

    class Spelt(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return Spelt()


def converted(function, way, tmp_path, *, shape=(2, 8, 4), **settings):
    """The program of the package of `function`, saved and loaded; `settings` are those of `converted_as`."""
    import torch

    return converted_as(spelt(function).eval(), torch.randn(shape), way, tmp_path / f"{way}.mlpackage", **settings)


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
