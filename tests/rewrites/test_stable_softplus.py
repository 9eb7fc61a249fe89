"""ANE305: softplus in every spelling torch has for it, right against PyTorch where the published fault is not."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.rewrites.normalization._log_exp_patterns import find_upper_bound
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import at_any_numbers, configure_rewrite, kinds
from tests.rewrites.spellings import WAYS, converted, grid, outputs, truth

SPELLINGS = {
    "softplus": F.softplus,
    "beta": lambda x: F.softplus(x, 2.0),
    "log1p": lambda x: torch.log1p(torch.exp(x)),
    "log of 1 + exp": lambda x: torch.log(1 + torch.exp(x)),
    "log of exp + 1, negated": lambda x: torch.log(torch.exp(-x) + 1),
}


rule = partial(configure_rewrite, "stable_softplus")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_is_pytorchs_softplus_in_every_spelling(name, way, tmp_path):
    function = SPELLINGS[name]
    before = converted(function, way, tmp_path / "before")
    assert find_matches(rule(), before).fired
    after = converted(function, way, tmp_path / "after", passes="stable_softplus")
    assert not find_matches(rule(), after).fired, "what the backend makes of it is still the stable form"
    x = grid()
    np.testing.assert_allclose(outputs(after, x, "float64"), truth(function, x), rtol=0, atol=5e-9)  # threshold 20


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
@pytest.mark.parametrize("name", ["softplus", "log of 1 + exp"])
def test_older_and_newer_targets(name, target, tmp_path):
    after = converted(SPELLINGS[name], "traced", tmp_path, passes="stable_softplus", target=target)
    assert not find_matches(rule(), after).fired
    assert (kinds(after)["softplus"], kinds(after)["exp"], kinds(after)["log"]) == (1, 0, 0)


def test_in_fp32_there_is_nothing_to_cure(tmp_path):
    before = converted(F.softplus, "traced", tmp_path, precision="FLOAT32")
    found = find_matches(rule(), before)
    assert not found.fired
    assert [miss.reason for miss in found.near_misses] == ["computed in fp32; the fault is in fp16 only"]


@pytest.mark.parametrize(("name", "quirk"), [
    ("softplus", "softplus_cliff"), ("beta", "softplus_cliff"), ("log1p", "exp_overflow"),
    ("log of 1 + exp", "exp_overflow")])
def test_the_published_faults_no_longer_reach_it(name, quirk, tmp_path):
    function, x = SPELLINGS[name], grid()
    expected = truth(function, x)
    before = converted(function, "traced", tmp_path / "before")
    wrong = outputs(before, x, "float16", [quirk])
    assert not np.isfinite(wrong).all() or np.abs(wrong - expected).max() > 10
    after = converted(function, "traced", tmp_path / "after", passes="stable_softplus")
    quirks = ["softplus_cliff", "exp_overflow", "log_softmax_underflow", "log_sum_exp_cliff"]
    found = outputs(after, x, "float16", quirks)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-7)


def test_a_threshold_of_our_frontend_keeps_its_select(tmp_path):
    def function(x):
        return F.softplus(x, threshold=12.0)

    with ane.torch_frontend.patched():
        built = converted(function, "traced", tmp_path)
    x = grid(reach=16.0)
    wrong = outputs(built, x, "float16", ["softplus_cliff"])
    assert np.abs(wrong - truth(function, x)).max() > 10
    apply_rewrite(rule(), built)
    assert kinds(built)["select"] == 1 and not find_matches(rule(), built).fired
    found = outputs(built, x, "float16", ["softplus_cliff"])
    np.testing.assert_allclose(found, truth(function, x), rtol=2e-3, atol=1e-7)


def test_the_hosts_pipeline_afterwards_leaves_it_as_it_is():
    built = build_program(lambda x: mb.softplus(x=x, name="y"), x=(2, 8))
    apply_rewrite(rule(), built)
    text = kinds(built)
    PassPipelineManager.apply_pipeline(built, ct.PassPipeline.DEFAULT)
    assert {kind: count for kind, count in kinds(built).items() if kind not in ("const", "cast")} \
        == {kind: count for kind, count in text.items() if kind != "const"}


def test_softplus_parametric_is_left_alone(tmp_path):
    before = converted(lambda x: F.softplus(x, 2.0), "traced", tmp_path, shape=(1, 2, 3, 4))
    found = find_matches(rule(), before)
    assert kinds(before)["softplus_parametric"] == 1
    assert not found.fired and not found.near_misses


def test_one_op_that_is_read_twice_is_computed_once():
    def body(x):
        soft = mb.softplus(x=x)
        return [mb.relu(x=soft, name="one"), mb.tanh(x=soft, name="two")]

    built = build_program(body, x=(2, 8))
    assert len(apply_rewrite(rule(), built).fired) == 1
    assert kinds(built)["softplus"] == 1


def test_the_identity_holds_for_every_number():
    built = build_program(lambda x: mb.softplus(x=x, name="y"), x=(8,))
    apply_rewrite(rule(), built)
    cured = Runtime(built, precision="float64")

    def holds(x):
        np.testing.assert_allclose(cured({"x": x})["y"], np.logaddexp(0, x.astype(np.float64)), rtol=1e-14, atol=1e-300)

    at_any_numbers(holds, 8, 65504)


BOUNDED = {
    "clip": (lambda x: mb.clip(x=x, alpha=np.float16(-3), beta=np.float16(4)), 4),
    "minimum": (lambda x: mb.minimum(x=np.float16(2), y=x), 2),
    "softmax": (lambda x: mb.softmax(x=x), 1),
    "-square": (lambda x: mb.mul(x=np.float16(-2), y=mb.square(x=x)), 0),
    "square times a positive number": (lambda x: mb.mul(x=np.float16(2), y=mb.square(x=x)), np.inf),
    "x - max": (lambda x: mb.sub(x=x, y=mb.reduce_max(x=x, axes=[-1], keep_dims=True)), 0),
    "min - max": (lambda x: mb.sub(x=mb.minimum(x=x, y=np.float16(1)), y=mb.maximum(x=x, y=np.float16(1))), np.inf),
    "x - max of another": (lambda x: mb.sub(x=x, y=mb.reduce_max(x=mb.relu(x=x), axes=[-1], keep_dims=True)), np.inf),
    "relu": (lambda x: mb.relu(x=x), np.inf),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_bounds_a_value_from_above(name):
    make, bound = BOUNDED[name]
    built = build_program(lambda x: make(x), x=(2, 8))
    (y,) = built.functions["main"].outputs
    assert find_upper_bound(y) == bound
    x = np.random.default_rng(0).standard_normal((2, 8)) * 20
    assert Runtime(built, precision="float64")({"x": x.astype(np.float16)})[y.name].max() <= bound
