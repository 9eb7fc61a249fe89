"""ANE306: mish in every spelling, right against PyTorch where the published fault is not, and at peace with ANE305."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.pipeline import sort_passes
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import at_any_numbers, configure_rewrite, kinds
from tests.rewrites.spellings import WAYS, converted, grid, outputs, truth

SPELLINGS = {
    "mish": F.mish,
    "softplus": lambda x: x * torch.tanh(F.softplus(x)),
    "tanh first": lambda x: torch.tanh(F.softplus(x)) * x,
    "by hand": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    "log1p": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
}


rule = partial(configure_rewrite, "stable_mish")


def mish(x):
    return x * np.tanh(np.logaddexp(0, x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_is_pytorchs_mish_in_every_spelling(name, way, tmp_path):
    function = SPELLINGS[name]
    assert find_matches(rule(), converted(function, way, tmp_path / "before")).fired
    after = converted(function, way, tmp_path / "after", passes="stable_mish")
    assert not {"softplus", "tanh", "log", "select"} & set(kinds(after))
    x = grid()
    np.testing.assert_allclose(outputs(after, x, "float64"), truth(F.mish, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
def test_older_and_newer_targets(target, tmp_path):
    after = converted(F.mish, "traced", tmp_path, passes="stable_mish", target=target)
    assert kinds(after)["real_div"] == 1 and kinds(after)["softplus"] == 0


def test_in_fp32_there_is_nothing_to_cure(tmp_path):
    found = find_matches(rule(), converted(F.mish, "traced", tmp_path, precision="FLOAT32"))
    assert not found.fired
    assert [miss.reason for miss in found.near_misses] == ["computed in fp32; the fault is in fp16 only"]


@pytest.mark.parametrize(("name", "quirk"), [("mish", "softplus_cliff"), ("by hand", "exp_overflow")])
def test_the_published_faults_no_longer_reach_it(name, quirk, tmp_path):
    x = grid()
    expected = truth(F.mish, x)
    before = converted(SPELLINGS[name], "traced", tmp_path / "before")
    wrong = outputs(before, x, "float32", [quirk])
    if name == "mish":
        assert np.abs(wrong - expected).max() > 10
    after = converted(SPELLINGS[name], "traced", tmp_path / "after", passes="stable_mish")
    found = outputs(after, x, "float16", ["softplus_cliff", "exp_overflow"])
    np.testing.assert_allclose(found, expected, rtol=4e-3, atol=2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_safe_preset_leaves_no_cliff(way, tmp_path):
    def function(x):
        soft = F.softplus(x)
        return x * torch.tanh(soft) + soft

    after = converted(function, way, tmp_path, passes="safe")
    assert not find_matches(rule(), after).fired
    assert not find_matches(find_rewrite("stable_softplus").configured(), after).fired
    assert kinds(after)["tanh"] == 0
    x = grid()
    found = outputs(after, x, "float16", ["softplus_cliff", "exp_overflow"])
    np.testing.assert_allclose(found, truth(function, x), rtol=4e-3, atol=2e-6)


def test_it_runs_before_the_rewrite_of_softplus():
    assert sort_passes(["stable_softplus", "stable_mish"]) == ["stable_mish", "stable_softplus"]
    passes = ane.pipeline(passes="stable_softplus,stable_mish").passes
    assert passes.index("ane::stable_mish") < passes.index("ane::stable_softplus")


def test_after_softplus_was_cured_there_is_no_mish_left_to_cure():
    built = build_program(lambda x: mb.mul(x=x, y=mb.tanh(x=mb.softplus(x=x)), name="y"), x=(2, 8))
    apply_rewrite(find_rewrite("stable_softplus").configured(), built)
    assert not apply_rewrite(rule(), built).fired


def test_a_small_result_keeps_its_digits():
    x = np.array([-9, -7, -5, -3, -1, -0.5, -0.01, 0.01, 0.5, 3, 9, 30, 1000, 65504], np.float16)
    built = build_program(lambda x: mb.mul(x=x, y=mb.tanh(x=mb.softplus(x=x)), name="y"), x=x.shape)
    apply_rewrite(rule(), built)
    found = Runtime(built, precision="float16")({"x": x})["y"].astype(np.float64)
    np.testing.assert_allclose(found, mish(x.astype(np.float64)), rtol=3e-3)


def test_the_identity_holds_for_every_number():
    built = build_program(lambda x: mb.mul(x=x, y=mb.tanh(x=mb.softplus(x=x)), name="y"), x=(8,))
    apply_rewrite(rule(), built)
    cured = Runtime(built, precision="float64")

    def holds(x):
        np.testing.assert_allclose(cured({"x": x})["y"], mish(x.astype(np.float64)), rtol=1e-12, atol=1e-300)

    at_any_numbers(holds, 8, 65504)
