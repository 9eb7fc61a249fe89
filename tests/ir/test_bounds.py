"""Intervals hold every value that the reference runtime computes, and are found where users bound values."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ir.bounds import infer_interval
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime

HALF = np.float16
LEAVES = {
    "clip": lambda x: mb.clip(x=x, alpha=HALF(-3), beta=HALF(2)),
    "sigmoid": lambda x: mb.sigmoid(x=x),
    "tanh": lambda x: mb.tanh(x=x),
    "mod": lambda x: mb.mod(x=x, y=HALF(4)),
    "reduced": lambda x: mb.sub(x=x, y=mb.mul(x=mb.round(x=mb.mul(x=x, y=HALF(0.25))), y=HALF(4))),
    "floored": lambda x: mb.sub(x=x, y=mb.mul(x=HALF(4), y=mb.floor(x=mb.real_div(x=x, y=HALF(4))))),
    "floored twice": lambda x: mb.sub(x=x, y=mb.mul(x=mb.floor(x=mb.mul(x=mb.floor(x=x), y=HALF(0.25))), y=HALF(4))),
    "fraction": lambda x: mb.sub(x=x, y=mb.floor(x=x)),
    "layer norm": lambda x: mb.layer_norm(x=x, axes=[-1], gamma=np.arange(8, dtype=HALF), beta=np.ones(8, HALF)),
    "instance norm": lambda x: mb.squeeze(x=mb.instance_norm(x=mb.expand_dims(x=x, axes=[0]), epsilon=HALF(1e-5)),
                                          axes=[0]),
    "unit": lambda x: mb.squeeze(x=mb.l2_norm(x=mb.expand_dims(x=x, axes=[0]), epsilon=HALF(1e-5)), axes=[0]),
    "truth": lambda x: mb.cast(x=mb.greater(x=x, y=HALF(0)), dtype="fp16"),
}
STEPS = {
    "times": lambda x: mb.mul(x=x, y=HALF(-2)),
    "plus": lambda x: mb.add(x=HALF(1.5), y=x),
    "minus": lambda x: mb.sub(x=HALF(1), y=x),
    "over": lambda x: mb.real_div(x=x, y=HALF(0.5)),
    "relu": lambda x: mb.relu(x=x),
    "abs": lambda x: mb.abs(x=x),
    "floor": lambda x: mb.floor(x=x),
    "self": lambda x: mb.mul(x=x, y=x),
    "square": lambda x: mb.square(x=x),
    "silu": lambda x: mb.silu(x=x),
    "gelu": lambda x: mb.gelu(x=x, mode="EXACT"),
    "pad": lambda x: mb.pad(x=x, pad=[1, 0], mode="constant", constant_val=HALF(7)),
    "minimum": lambda x: mb.minimum(x=x, y=HALF(1)),
    "maximum": lambda x: mb.maximum(x=HALF(-1), y=x),
    "joined": lambda x: mb.concat(values=[x, mb.abs(x=x)], axis=-1),
}

_LONGEST = 8
"Producers from the identity to the input: two for a step, up to four for a leaf."


@pytest.mark.law
@given(st.sampled_from(sorted(LEAVES)), st.lists(st.sampled_from(sorted(STEPS)), max_size=2),
       st.integers(0, 2**31))
def test_an_interval_holds_what_is_computed(leaf, steps, seed):
    def body(x):
        y = LEAVES[leaf](x)
        for step in steps:
            y = STEPS[step](y)
        return mb.identity(x=y, name="y")

    built = build_program(body, x=(3, 8))
    interval = infer_interval(built.functions["main"].outputs[0], depth=_LONGEST)
    assert interval is not None
    x = (np.random.default_rng(seed).standard_normal((3, 8)) * 100).astype(HALF)
    y = Runtime(built, precision="float64")({"x": x})["y"].astype(np.float64)
    low, high = interval
    assert low - 1e-2 <= y.min() and y.max() <= high + 1e-2


@pytest.mark.parametrize("unbounded", [
    lambda x: mb.relu(x=x), lambda x: mb.exp(x=x), lambda x: mb.real_div(x=HALF(1), y=mb.sigmoid(x=x)),
    lambda x: mb.sub(x=x, y=mb.mul(x=mb.round(x=mb.mul(x=x, y=HALF(0.5))), y=HALF(4))),
    lambda x: mb.mod(x=HALF(4), y=x),
    lambda x: mb.sub(x=x, y=mb.mul(x=mb.floor(x=mb.mul(x=mb.floor(x=x), y=HALF(4))), y=HALF(0.25))),
    lambda x: mb.sub(x=x, y=mb.floor(x=mb.mul(x=x, y=HALF(2)))),
], ids=["relu", "exp", "one over sigmoid", "not its own quotient", "by a value", "by a fraction of the floor", "twice"])
def test_what_nothing_bounds_has_no_interval(unbounded):
    built = build_program(lambda x: mb.identity(x=unbounded(x), name="y"), x=(3, 8))
    assert infer_interval(built.functions["main"].outputs[0]) is None
