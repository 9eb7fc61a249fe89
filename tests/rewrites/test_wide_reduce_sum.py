"""ANE313: PyTorch's sums and means, formed where the ANE has the bits for them."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.equivalence.execution import Plan
from mil_ane_passes.equivalence.range_measurement import make_measurer
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import load_converted
from tests.rewrites.helpers import kinds, only_output
from tests.rules.helpers import WAYS, converted

SPELLINGS = {
    "sum": (lambda x: x.sum(-1), (2, 3, 2048)),
    "sum kept": (lambda x: x.sum(1, keepdim=True), (2, 2048, 3)),
    "everything": (lambda x: x.sum(), (2, 4, 16, 32)),
    "mean": (lambda x: x.mean((2, 3)), (1, 3, 56, 56)),
    "global pooling": (lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 1), (1, 3, 64, 48)),
    "variance": (lambda x: x.var(-1, unbiased=False), (2, 4096)),
    "einsum": (lambda x: torch.einsum("bcn->bc", x), (2, 3, 2048)),
}


def fixed(built, feeds=None, **options):
    measure = None if feeds is None else make_measurer(lambda each: [Plan("main", "given", feeds, {})])
    return apply_rewrite(find_rewrite("wide_reduce_sum").configured(**options), built, measure=measure)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_found_as_torch_spells_it(spelling, way):
    function, shape = SPELLINGS[spelling]
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float16)).float()
    built = converted(function, x, way=way)
    assert fixed(built).fired
    assert not {"reduce_sum", "reduce_mean"} & set(kinds(built))
    found = only_output(built, x.numpy(), "float64")
    np.testing.assert_allclose(found, function(x.double()).numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(tmp_path, target):
    x = torch.zeros(1, 3, 64, 64)
    loaded = load_converted(torch.nn.AdaptiveAvgPool2d(1), x, path=tmp_path / "m.mlpackage", passes="wide_reduce_sum",
                            minimum_deployment_target=target)
    assert kinds(loaded)["matmul"] == 1 and not find_matches(find_rewrite("wide_reduce_sum").configured(), loaded).fired
    value = np.random.default_rng(0).standard_normal(x.shape).astype(np.float16).astype(np.float32)
    expected = torch.from_numpy(value).double().mean((2, 3), keepdim=True).numpy()
    np.testing.assert_allclose(only_output(loaded, value, "float64"), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["reduce_sum", "reduce_mean"])
def test_the_published_fault_no_longer_reaches_it(kind):
    x = np.random.default_rng(0).uniform(0.4, 0.49, (2, 4096)).astype(np.float16)  # lost beside a sum of 1024
    built = build_program(lambda x: getattr(mb, kind)(x=x, axes=[1], name="y"), x=x.shape)
    right = getattr(torch.from_numpy(x).double(), kind.removeprefix("reduce_"))(1).numpy()
    faulty = only_output(built, x, "float16", ["narrow_reduce_sum"])
    assert (np.abs(faulty - right) > 0.02 * right).all()
    fixed(built)
    cured = only_output(built, x, "float16", ["narrow_reduce_sum", "mac_overflow_32768"])
    np.testing.assert_allclose(cured, right, rtol=2**-10)


def test_with_feeds_partial_sums_stay_below_the_other_fault():
    x = np.random.default_rng(0).uniform(0, 255, (2, 3, 64, 64)).astype(np.float16)
    expected = torch.from_numpy(x).double().mean((2, 3)).numpy()

    def built():
        return build_program(lambda x: mb.reduce_mean(x=x, axes=[2, 3], name="y"), x=x.shape)

    blind, seeing = built(), built()
    (without,) = fixed(blind).fired
    (with_feeds,) = fixed(seeing, {"x": x}).fired
    assert "which was not measured" in without.reason and "scaled by 2^-5" in with_feeds.reason
    assert np.isinf(only_output(blind, x, "float16", ["mac_overflow_32768"])).all()
    np.testing.assert_allclose(only_output(seeing, x, "float16", ["mac_overflow_32768"]), expected, rtol=2**-9)


def test_sums_of_one_length_share_their_ones():
    def body(x):
        return [mb.reduce_sum(x=x, axes=[1], name="a"), mb.reduce_sum(x=mb.relu(x=x), axes=[1], name="b")]

    built = build_program(body, x=(2, 2048))
    assert len(fixed(built).fired) == 2
    assert sum(op.op_type == "const" and op.outputs[0].shape == (2048, 1) for _, op in iterate_ops(built)) == 1


@st.composite
def reductions(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axes = draw(st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda a: a % len(shape)))
    return shape, axes, draw(st.booleans()), draw(st.sampled_from(["reduce_sum", "reduce_mean"]))


@pytest.mark.law
@given(reductions(), st.integers(0, 2**31))
def test_any_reduction_is_the_same_algebra(drawn, seed):
    shape, axes, keeps, kind = drawn
    built = build_program(
        lambda x: getattr(mb, kind)(x=x, axes=axes or None, keep_dims=keeps, name="y"), x=tuple(shape)
    )
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    before = Runtime(built, precision="float64")({"x": x})["y"]
    assert fixed(built, least=1).fired
    after = Runtime(built, precision="float64")({"x": x})["y"]
    assert after.shape == before.shape and after.dtype == before.dtype
    np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-12)
