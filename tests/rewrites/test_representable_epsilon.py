"""ANE311: norms whose epsilon fp16 cannot hold divide by something, and move by no more than the page says."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.package import load
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.rewrites.helpers import configure_rewrite, only_output, torch_outputs
from tests.rewrites.spellings import spelt

TINY = 2.0**-24
FLUSHING = {"smallest": 2.0**-14}


rule = partial(configure_rewrite, "representable_epsilon")


def layer_norm(epsilon, dtype=types.fp16):
    return build_program(lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=epsilon, name="y"), dtype=dtype, x=(4, 32))


def converted(module, shape=(4, 32), target=ct.target.iOS17, precision=ct.precision.FLOAT16):
    return convert_model(module, torch.ones(shape), names="x", convert_to="milinternal", compute_precision=precision,
                         minimum_deployment_target=target)


def epsilons(built):
    return [op.epsilon.val for op in built.functions["main"].operations
            if op.op_type.endswith("_norm") and "epsilon" in op.inputs]


def test_a_row_without_variance_is_zeros_and_no_longer_nan():
    built = layer_norm(np.float16(1e-12))  # 0, as fp16 has it
    x = np.ones((4, 32), np.float16)
    assert np.isnan(Runtime(built, precision="float16")({"x": x})["y"]).all()
    assert apply_rewrite(rule(), built).fired
    assert (Runtime(built, precision="float16")({"x": x})["y"] == 0).all()


def test_it_is_pytorchs_layer_norm_within_the_stated_bound():
    built = layer_norm(np.float32(1e-12))
    assert apply_rewrite(rule(), built).fired
    assert epsilons(built) == [np.float32(TINY)] and epsilons(built)[0].dtype == np.float32
    x = np.random.default_rng(0).standard_normal((4, 32)) * np.array([[100], [1], [0.1], [2.0**-6.5]])
    expected = torch_outputs(torch.nn.LayerNorm(32, eps=1e-12, elementwise_affine=False), torch.from_numpy(x))
    found = Runtime(built, precision="float64")({"x": x})["y"]
    variance = x.var(-1, keepdims=True)
    assert np.all(np.abs(found - expected) <= (2.0**-25 / variance + 1e-12) * np.abs(expected))
    assert not apply_rewrite(rule(), built).fired


@pytest.mark.law
@given(power=st.integers(-7, 6), epsilon=st.sampled_from([0.0, 1e-30, 1e-12, 1e-8, 5e-8]), seed=st.integers(0, 9))
def test_above_a_variance_of_two_to_the_minus_14_it_moves_by_half_a_unit_at_most(power, epsilon, seed):
    x = np.random.default_rng(seed).standard_normal((4, 32))
    x *= 2.0**power / x.std(-1, keepdims=True)
    built = layer_norm(np.float32(epsilon))
    expected = Runtime(built, precision="float64")({"x": x})["y"]
    assert apply_rewrite(rule(), built).fired
    found = Runtime(built, precision="float64")({"x": x})["y"]
    assert np.all(np.abs(found - expected) <= 2.0**-11 * np.abs(expected) * (1 + 1e-6))


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17, ct.target.iOS18], ids=str)
@pytest.mark.parametrize("module", [
    torch.nn.LayerNorm(32, eps=1e-12), torch.nn.GroupNorm(1, 32, eps=1e-12),
    spelt(lambda x: torch.nn.functional.normalize(x, dim=-1)),
    spelt(lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-9)),
], ids=["LayerNorm", "GroupNorm", "normalize", "fraction"])
def test_what_coremltools_casts_it_has_raised_itself(module, target):
    assert not find_matches(rule(), converted(module, target=target)).fired


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17], ids=str)
def test_a_flushing_machine_gets_a_normal_number_when_asked_for(target):
    built = converted(torch.nn.LayerNorm(32, eps=1e-12), target=target)
    trace = apply_rewrite(rule(**FLUSHING), built)
    assert trace.fired and trace.strength is Exactness.APPROXIMATE
    assert float(epsilons(built)[0]) == 2.0**-14


@pytest.mark.parametrize("function", [
    lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-9),
    lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12),
    lambda x: torch.nn.functional.normalize(x, dim=-1),
], ids=["rms", "length", "clamped", "normalize"])
def test_constants_of_spelt_norms_for_a_flushing_machine(function):
    built = converted(spelt(function))
    assert apply_rewrite(rule(**FLUSHING), built).fired
    x = np.random.default_rng(0).standard_normal((4, 32))
    expected = torch_outputs(spelt(function), torch.from_numpy(x))
    np.testing.assert_allclose(only_output(built, x, "float64"), expected, atol=2.0**-11 * np.abs(expected).max())
    assert not apply_rewrite(rule(**FLUSHING), built).fired


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17], ids=str)
@pytest.mark.parametrize("function", [
    lambda x: torch.log(x.abs() + 1e-10), torch.log, lambda x: torch.log(x.clamp(min=1e-10)), torch.rsqrt,
    lambda x: 1 / (x.sum(-1, keepdim=True) + 1e-9),
], ids=["log", "log as it is", "log of a bound", "rsqrt", "reciprocal"])
def test_where_the_result_at_zero_is_the_epsilons_it_stays(function, target):
    built = converted(spelt(function), target=target)
    assert not find_matches(rule(), built).fired
    assert not find_matches(rule(**FLUSHING), built).fired


def test_beside_the_epsilon_that_is_added_rsqrts_own_does_not_count():
    built = converted(spelt(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))
    trace = find_matches(rule(), built)
    assert not trace.fired and not trace.near_misses
    apply_rewrite(find_rewrite("scaled_rms_norm").configured(), built)
    trace = find_matches(rule(), built)
    assert not trace.fired and not trace.near_misses


@pytest.mark.parametrize("function", [
    lambda x: torch.cos(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7),
    lambda x: 0.5 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7),
    lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7) ** 2 * x,
], ids=["another value", "a constant", "the square of the root"])
def test_what_is_not_zero_where_the_norm_is_keeps_its_epsilon(function):
    assert not find_matches(rule(**FLUSHING), converted(spelt(function))).fired


@pytest.mark.parametrize("function", [
    lambda x: x * 2 * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7),
    lambda x: torch.arange(32) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7) * x,
], ids=["a multiple of x", "weights first"])
def test_multiples_of_what_was_squared_may_be_divided(function):
    assert find_matches(rule(**FLUSHING), converted(spelt(function))).fired


def test_a_negative_epsilon_is_not_too_small():
    assert not find_matches(rule(), layer_norm(np.float32(-1e-3))).fired


def test_fp32_models_hold_their_epsilon():
    trace = find_matches(rule(), converted(torch.nn.LayerNorm(32, eps=1e-12), precision=ct.precision.FLOAT32))
    assert [miss.reason for miss in trace.near_misses] == ["computed in fp32, which represents 1e-12"]


def test_a_saved_package_keeps_the_raised_epsilon(tmp_path):
    model = ct.convert(layer_norm(np.float32(1e-12)), convert_to="mlprogram", skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS17,
                       pass_pipeline=ane.pipeline(passes="representable_epsilon"))
    model.save(str(tmp_path / "norm.mlpackage"))
    built = load(tmp_path / "norm.mlpackage").program
    assert [float(epsilon) for epsilon in epsilons(built)] == [TINY]
    assert not apply_rewrite(rule(), built).fired


def test_nan_and_infinities_stay_what_they_were():
    built = layer_norm(np.float32(1e-12))
    x = np.ones((4, 32), np.float16)
    x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, -np.inf
    expected = Runtime(built, precision="float64")({"x": x})["y"]
    apply_rewrite(rule(), built)
    np.testing.assert_array_equal(Runtime(built, precision="float64")({"x": x})["y"], expected)
