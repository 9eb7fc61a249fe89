"""ANE308: log-sum-exp in every spelling, right against PyTorch where the published faults are not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.ir.query import count_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.rewrites.normalization.stable_log_sum_exp import count_doubling_steps
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import at_any_numbers, configure_rewrite, kinds
from tests.rewrites.spellings import WAYS, converted, grid, outputs, truth

QUIRKS = ["softplus_cliff", "exp_overflow", "log_softmax_underflow", "log_sum_exp_cliff"]
SPELLINGS = {
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "kept": lambda x: torch.logsumexp(x, (1, 2), keepdim=True),
    "log of sum of exp": lambda x: torch.log(torch.exp(x).sum(1)),
    "all": lambda x: torch.exp(x).sum().log(),
}
RUNNING = {
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "log of cumsum of exp": lambda x: torch.log(torch.cumsum(torch.exp(x), 2)),
}


rule = partial(configure_rewrite, "stable_log_sum_exp")


def running(shape, axis=-1):
    return build_program(lambda x: mb.log(x=mb.cumsum(x=mb.exp(x=x), axis=axis), name="y"), x=shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SPELLINGS, *RUNNING])
def test_is_pytorchs_in_every_spelling(name, way, tmp_path):
    function = {**SPELLINGS, **RUNNING}[name]
    before = converted(function, way, tmp_path / "before")
    stable = way == "decomposed" and name in ("logsumexp", "kept")  # torch's own decomposition takes the maximum off
    assert bool(find_matches(rule(), before).fired) != stable
    after = converted(function, way, tmp_path / "after", passes="stable_log_sum_exp")
    assert not find_matches(rule(), after).fired
    x = grid()
    np.testing.assert_allclose(outputs(after, x, "float64"), truth(function, x), rtol=1e-9)
    if not stable:
        np.testing.assert_allclose(outputs(after, x, "float16", QUIRKS), truth(function, x), rtol=2e-3, atol=0.02)


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
@pytest.mark.parametrize("name", ["logsumexp", "logcumsumexp"])
def test_older_and_newer_targets(name, target, tmp_path):
    function = {**SPELLINGS, **RUNNING}[name]
    after = converted(function, "traced", tmp_path, passes="stable_log_sum_exp", target=target)
    assert not {"log", "cumsum", "exp"} & set(kinds(after))


def test_in_fp32_there_is_nothing_to_cure(tmp_path):
    found = find_matches(rule(), converted(SPELLINGS["logsumexp"], "traced", tmp_path, precision="FLOAT32"))
    assert not found.fired
    assert [miss.reason for miss in found.near_misses] == ["computed in fp32; the fault is in fp16 only"]


@pytest.mark.parametrize("name", ["logsumexp", "log of sum of exp", *RUNNING])
def test_the_published_faults_no_longer_reach_it(name, tmp_path):
    function, x = {**SPELLINGS, **RUNNING}[name], grid()
    expected = truth(function, x)
    before = converted(function, "traced", tmp_path / "before")
    wrong = outputs(before, x, "float16", QUIRKS)
    assert not np.isfinite(wrong).all() or np.abs(wrong - expected).max() > 10
    after = converted(function, "traced", tmp_path / "after", passes="stable_log_sum_exp")
    np.testing.assert_allclose(outputs(after, x, "float16", QUIRKS), expected, rtol=2e-3, atol=0.02)


def test_the_cliff_of_the_report():
    """32 equal channels: 11.10 at 7.63, and 0 from there on."""
    built = build_program(lambda x: mb.reduce_log_sum_exp(x=x, axes=[1], name="y"), x=(1, 32, 2))
    x = np.broadcast_to(np.array([7.5, 7.75], np.float16), (1, 32, 2))
    expected = np.logaddexp.reduce(x.astype(np.float64), axis=1)
    assert Runtime(built, precision="float16", quirks=QUIRKS)({"x": x})["y"][0, 1] == 0
    apply_rewrite(rule(), built)
    found = Runtime(built, precision="float16", quirks=QUIRKS)({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_rows_of_infinities():
    x = np.array([[-np.inf, -np.inf], [-np.inf, 3], [np.inf, 3], [np.inf, -np.inf]], np.float16)
    for built in (build_program(lambda x: mb.reduce_log_sum_exp(x=x, axes=[1], name="y"), x=x.shape), running(x.shape)):
        apply_rewrite(rule(), built)
        for precision in ("float64", "float16"):
            found = Runtime(built, precision=precision)({"x": x})["y"]
            last = found if found.ndim == 1 else found[:, -1]
            assert last.tolist() == [-np.inf, 3, np.inf, np.inf]


def test_a_running_sum_keeps_what_a_fixed_maximum_would_lose():
    """The numbers of the report, in which the first element is 49 below the last."""
    x = np.array([[1, 5, 10, 12, 15, 20, 50]], np.float16)
    built = running(x.shape)
    assert np.isinf(Runtime(built, precision="float16")({"x": x})["y"]).any()
    apply_rewrite(rule(), built)
    expected = np.logaddexp.accumulate(x.astype(np.float64), axis=1)
    np.testing.assert_allclose(Runtime(built, precision="float16", quirks=QUIRKS)({"x": x})["y"], expected, rtol=1e-3)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_a_running_sum_of_any_length(length):
    x = grid((2, length, 3), 20.0).astype(np.float16)
    built = running(x.shape, 1)
    apply_rewrite(rule(), built)
    assert count_ops(built) == max(1, 10 * count_doubling_steps(length))
    found = Runtime(built, precision="float64")({"x": x})["y"]
    np.testing.assert_allclose(found, np.logaddexp.accumulate(x.astype(np.float64), axis=1), rtol=1e-12, atol=1e-12)


def test_the_length_of_a_running_sum_is_an_option():
    assert not find_matches(rule(), running((1, 257))).fired
    assert find_matches(rule(longest=512), running((1, 257))).fired


def test_a_flexible_running_sum_says_why_not():
    found = find_matches(rule(), running((1, None)))
    assert not found.fired and "flexible" in found.near_misses[0].reason


def test_a_long_running_sum_is_as_near_as_before():
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float16)
    expected = np.logaddexp.accumulate(x.astype(np.float64), axis=1)
    built = running(x.shape)
    before = np.abs(Runtime(built, precision="float16")({"x": x})["y"] - expected).max()
    apply_rewrite(rule(), built)
    assert np.abs(Runtime(built, precision="float16")({"x": x})["y"] - expected).max() < 4 * before


@pytest.mark.parametrize(("axes", "fires"), [([1], False), ([2], True), ([1, 2], True)])
def test_a_maximum_over_other_axes_is_not_enough(axes, fires):
    built = build_program(lambda x: mb.reduce_log_sum_exp(
        x=mb.sub(x=x, y=mb.reduce_max(x=x, axes=[1], keep_dims=True)), axes=axes, name="y"), x=(2, 4, 8))
    assert bool(find_matches(rule(), built).fired) == fires


def test_the_logarithm_of_a_log_sum_exp_is_none():
    built = build_program(lambda x: mb.log(x=mb.reduce_log_sum(x=mb.exp(x=x), axes=[1]), name="y"), x=(2, 4))
    assert (
        len(find_matches(rule(), built).fired) == 1 and find_matches(rule(), built).fired[0].op == "reduce_log_sum"
    )


def test_an_exponential_that_others_read_stays_for_them():
    def body(x):
        power = mb.exp(x=x)
        return [mb.relu(x=power, name="e"), mb.log(x=mb.reduce_sum(x=power, axes=[1]), name="y")]

    built = build_program(body, x=(2, 4))
    apply_rewrite(rule(), built)
    assert (kinds(built)["exp"], kinds(built)["log"], kinds(built)["reduce_log_sum_exp"]) == (1, 0, 1)


@pytest.mark.parametrize("built", [
    build_program(lambda x: mb.reduce_log_sum_exp(x=x, axes=[1], name="y"), x=(1, 7)), running((1, 7))],
    ids=["reduced", "running"])
def test_holds_for_every_row_of_numbers(built):
    apply_rewrite(rule(), built)
    cured = Runtime(built, precision="float64")

    def holds(numbers):
        x = numbers[None]
        found = cured({"x": x})["y"]
        expected = np.logaddexp.accumulate(x.astype(np.float64), axis=1)
        np.testing.assert_allclose(found, expected if found.ndim == 2 else expected[:, -1], rtol=1e-12, atol=1e-12)

    at_any_numbers(holds, 7, 6e4)
