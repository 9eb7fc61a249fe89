"""An unrolled layer is compared with the same arithmetic: the op keeps float32 between its steps, the steps do not."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.equivalence.comparison import Strictness
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rewrites
from mil_ane_passes.runtime import Runtime

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
PRECISIONS = ("float64", "float16")


def layer(kind, seed, change=1.0):
    random = np.random.default_rng(seed)
    steps, batch, inputs, size = (int(random.integers(low, 9)) for low in (2, 1, 2, 2))

    def drawn(*shape):
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float16)

    weights = {"weight_ih": drawn(GATES[kind] * size, inputs), "weight_hh": drawn(GATES[kind] * size, size),
               "bias": drawn(GATES[kind] * size), "initial_h": drawn(batch, size)}
    if kind == "lstm":
        weights["initial_c"] = drawn(batch, size)
    weights["weight_hh"][0] *= np.float16(change)
    return build_program(lambda x: mb.identity(x=getattr(mb, kind)(x=x, output_sequence=True, **weights)[0], name="y"),
                         x=(steps, batch, inputs))


def unrolled(kind, before):
    after = clone_program(before)
    trace = apply_rewrite(get_all_rewrites()[f"unroll_{kind}"](), after)
    assert trace.fired
    return after, Strictness(trace.strength, ulps=trace.ulps)


@pytest.mark.parametrize("kind", GATES)
def test_right_ones_pass(kind):
    for seed in range(12):
        before = layer(kind, seed)
        after, promised = unrolled(kind, before)
        report = compare_programs(before, after, precisions=PRECISIONS, exactness=promised, locate=False)
        assert report.equal, (seed, str(report))


@pytest.mark.parametrize("kind", GATES)
def test_wrong_ones_do_not(kind):
    for seed in range(3):
        after, promised = unrolled(kind, layer(kind, seed, 1.05))
        report = compare_programs(layer(kind, seed), after, precisions=PRECISIONS, exactness=promised, locate=False)
        assert report.status == "different", seed


@pytest.mark.parametrize("kind", GATES)
def test_rounded_steps_are_less_exact_at_float16_and_the_same_elsewhere(kind):
    before = layer(kind, 1)
    feeds = {"x": np.random.default_rng(0).standard_normal(before.functions["main"].inputs["x"].shape).astype("f2")}
    exact = Runtime(before, precision="float64")(feeds)["y"]
    plain, stepped = (Runtime(before, precision="float16", rounded_steps=rounds)(feeds)["y"]
                      for rounds in (False, True))
    assert np.abs(plain - exact).mean() < np.abs(stepped - exact).mean() < 0.01
    for precision in ("float32", "float64"):
        one, other = (Runtime(before, precision=precision, rounded_steps=rounds)(feeds)["y"]
                      for rounds in (False, True))
        np.testing.assert_array_equal(one, other)


def test_the_examples_of_the_rule_pass():
    rule = get_all_rewrites()["unroll_lstm"]
    (example,) = [each for each in rule().examples() if each.name == "other activations"]
    before = example.build()
    after, promised = unrolled("lstm", before)
    assert compare_programs(before, after, precisions=PRECISIONS, exactness=promised).equal
