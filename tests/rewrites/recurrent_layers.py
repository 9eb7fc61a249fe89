"""What the tests of recurrent layers share: drawn fp16 numbers, PyTorch's layers converted, and unrolled programs."""

from __future__ import annotations

import numpy as np

import mil_ane_passes as ane
from mil_ane_passes import torch_frontend
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.rewrites.helpers import unsupported_ops

WAYS = ("traced", "exported")
HALF = 2.0 ** -9
"How far a value of up to 1 may be off after a few steps in fp16: two units in the last place."


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def initial(seed, hidden, *shape):
    """Weights as PyTorch's recurrent layers begin with: evenly up to 1 / sqrt(hidden)."""
    return np.random.default_rng(seed).uniform(-hidden ** -0.5, hidden ** -0.5, shape).astype(np.float16)


def held(layer):
    """The layer with weights that fp16 has; the biases of the state are zero, for MIL's layers have but one."""
    import torch

    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.zeros_like(parameter) if name.startswith("bias_hh") else
                            parameter.half().to(parameter.dtype))
    return layer.eval()


def torch_states(state, ways):
    """[batch, ways * hidden] as PyTorch has it: [ways, batch, hidden], in float64."""
    import torch

    return torch.from_numpy(np.stack(np.split(state, ways, -1))).double()


def unrolled(name, built, feeds, half=True, **options):
    """Rewrite `built` and return its outputs at float64; the rewrite has to fire, once.

    With `half` those at float16 are held to an error of `HALF`. That is meant for gates between -1 and 1: others
    multiply what a step rounds.
    """
    trace = apply_rewrite(find_rewrite(name).configured(**options), built)
    assert len(trace.fired) == 1, trace.near_misses
    built.validate()
    found = {precision: Runtime(built, precision=precision)(feeds).values() for precision in ("float64", "float16")}
    for value, truth in zip(found["float16"] if half else (), found["float64"]):
        np.testing.assert_allclose(value.astype(np.float64), truth, rtol=0, atol=HALF)
    return list(found["float64"])


def converted(layer, way, shape, tmp_path, passes=None):
    """The program of the saved fp16 package that a module becomes by the patched frontend."""
    import torch

    path = tmp_path / f"{way}{passes}.mlpackage"
    with torch_frontend.patched():
        convert_model(layer, torch.randn(shape), way=way, names="x", passes=passes).save(str(path))
    return ane.load(path).program


def refused(program, target="m4"):
    """The op types that the ANE is predicted not to take, but for casts of what is handed over."""
    return set(unsupported_ops(program, target)) - {"cast"}
