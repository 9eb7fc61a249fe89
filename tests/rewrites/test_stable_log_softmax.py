"""ANE307: log-softmax as torch spells it, right against PyTorch where one class is far ahead."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.equivalence.comparison import Strictness
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import at_any_numbers, configure_rewrite, kinds
from tests.rewrites.spellings import WAYS, converted, grid, outputs, truth

QUIRKS = ["softplus_cliff", "exp_overflow", "log_softmax_underflow", "log_sum_exp_cliff"]
SPELLINGS = {
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "layer": torch.nn.LogSoftmax(dim=-1),
    "log of softmax": lambda x: torch.log(torch.softmax(x, 1)),
    "less its log-sum-exp": lambda x: x - torch.logsumexp(x, 1, keepdim=True),
    "loss": lambda x: -F.log_softmax(x, 1)[:, 3],
}


rule = partial(configure_rewrite, "stable_log_softmax")


def built_for(shape):
    """As converted: the epsilon of a log stays fp32."""
    return build_program(lambda x: mb.log(x=mb.softmax(x=x), epsilon=np.float32(1e-45), name="y"), x=shape)


def log_softmax(x, axis=-1):
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_is_pytorchs_log_softmax_in_every_spelling(name, way, tmp_path):
    function = SPELLINGS[name]
    stable = way == "decomposed" and name == "less its log-sum-exp"  # torch's decomposition takes the maximum off
    assert bool(find_matches(rule(), converted(function, way, tmp_path / "before")).fired) != stable
    after = converted(function, way, tmp_path / "after", passes="stable_log_softmax")
    assert kinds(after)["softmax"] == 0
    assert not find_matches(rule(), after).fired
    x = grid()
    expected = truth(lambda x: F.log_softmax(x, 1)[:, 3] * -1, x) if name == "loss" else truth(function, x) \
        if name != "log of softmax" else log_softmax(x.astype(np.float64), 1)
    np.testing.assert_allclose(outputs(after, x, "float64"), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
def test_older_and_newer_targets(target, tmp_path):
    after = converted(SPELLINGS["log_softmax"], "traced", tmp_path, passes="stable_log_softmax", target=target)
    assert (kinds(after)["softmax"], kinds(after)["log"]) == (0, target == "iOS18")  # the floor of an fp32 epsilon


def test_in_fp32_there_is_nothing_to_cure(tmp_path):
    found = find_matches(rule(), converted(SPELLINGS["log_softmax"], "traced", tmp_path, precision="FLOAT32"))
    assert not found.fired
    assert [miss.reason for miss in found.near_misses] == ["computed in fp32; the fault is in fp16 only"]


def test_the_published_fault_no_longer_reaches_it(tmp_path):
    """The numbers of the report: one logit of 50 among zeros."""
    x = np.zeros((1, 8), np.float32)
    x[0, 3] = 50
    before = converted(F.log_softmax, "traced", tmp_path / "before", shape=(1, 8))
    assert np.isneginf(outputs(before, x, "float16", QUIRKS)).sum() == 7
    after = converted(F.log_softmax, "traced", tmp_path / "after", shape=(1, 8), passes="stable_log_softmax")
    assert np.array_equal(outputs(after, x, "float16", QUIRKS), x - 50)


def test_what_is_large_keeps_its_digits(tmp_path):
    """x - log-sum-exp of x is near the rounding of x; the maximum taken off first, it is near its own."""
    function, x = SPELLINGS["less its log-sum-exp"], np.full((2, 8, 4), 1000, np.float32)
    expected = truth(function, x)
    before = converted(function, "traced", tmp_path / "before")
    assert np.abs(outputs(before, x, "float16", QUIRKS) - expected).max() > 900
    assert np.abs(outputs(before, x, "float16") - expected).max() > 0.05
    for passes in ("stable_log_softmax", "safe"):
        after = converted(function, "traced", tmp_path / passes, passes=passes)
        assert kinds(after)["reduce_log_sum_exp"] == 1
        np.testing.assert_allclose(outputs(after, x, "float16", QUIRKS), expected, rtol=1e-3)


def test_far_behind_it_has_the_floor_of_the_logarithm_where_that_is_not_lost():
    """log adds 1e-45 to a probability of 0; where fp16 loses that, the difference of the logits is left."""
    x = np.array([[0, -200, -1e4]], np.float16)
    built = built_for((1, 3))
    before = Runtime(built, precision="float64")({"x": x})["y"]
    apply_rewrite(rule(), built)
    found = Runtime(built, precision="float64")({"x": x})["y"]
    np.testing.assert_allclose(found, before, rtol=1e-12)
    assert -104 < found.min() < -103
    assert Runtime(built, precision="float16", quirks=QUIRKS)({"x": x})["y"].tolist() == [[0, -200, -1e4]]


@pytest.mark.parametrize("target", ["iOS16", "iOS17"])
@pytest.mark.parametrize("mask", [-200.0, -1e4, -float("inf")])
def test_what_is_masked_is_proved_too(mask, target, tmp_path):
    row = torch.zeros(8)
    row[::3] = mask
    before = converted(lambda x: F.log_softmax(x + row, -1), "traced", tmp_path, target=target, shape=(2, 8))
    after = clone_program(before)
    fired = apply_rewrite(rule(), after)
    assert fired.fired
    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, within=fired.within)
    assert compare_programs(before, after, precisions=("float64", "float16"), exactness=promised).equal


def test_a_row_without_a_finite_logit_stays_no_number():
    x = np.full((2, 3), -np.inf, np.float16)
    x[1, 0] = 1
    built = built_for((2, 3))
    apply_rewrite(rule(), built)
    found = Runtime(built, precision="float16", quirks=QUIRKS)({"x": x})["y"]
    assert np.isnan(found[0]).all() and found[1].tolist() == [0, -np.inf, -np.inf]


def test_a_softmax_that_others_read_stays_for_them(tmp_path):
    def function(x):
        soft = torch.softmax(x, 1)
        return torch.log(soft) + soft

    after = converted(function, "traced", tmp_path, passes="stable_log_softmax")
    assert (kinds(after)["softmax"], kinds(after)["reduce_log_sum_exp"]) == (1, 1)


def test_a_bound_below_the_probabilities_is_kept(tmp_path):
    before = converted(lambda x: torch.log(torch.softmax(x, 1) + 1e-4), "traced", tmp_path)
    assert not find_matches(rule(), before).fired


def test_holds_for_every_row_of_numbers():
    built = build_program(lambda x: mb.log(x=mb.softmax(x=x), name="y"), x=(1, 8))  # without a floor
    apply_rewrite(rule(), built)
    cured = Runtime(built, precision="float64")

    def holds(numbers):
        x = numbers[None]
        np.testing.assert_allclose(cured({"x": x})["y"], log_softmax(x.astype(np.float64)), rtol=1e-12, atol=1e-12)

    at_any_numbers(holds, 8, 3e4)
