"""ANE204: products along axes, as PyTorch takes them, from halves that are multiplied."""

from __future__ import annotations

import math
from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import reload_program
from tests.rewrites.helpers import configure_rewrite, kinds, only_output, unsupported_ops

rule = partial(configure_rewrite, "product_by_parts")


def numbers(shape, seed=0):
    """Numbers that fp16 has, of both signs, between a half and two in magnitude."""
    random = np.random.default_rng(seed)
    return (random.uniform(0.5, 2, shape) * random.choice([-1, 1], shape)).astype(np.float16)


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_it_is_pytorchs_prod_which_the_host_s_frontend_does_not_convert(dim):
    x = numbers((3, 5, 4))
    options = {} if dim is None else {"axes": [dim]}
    built = build_program(lambda x: mb.reduce_prod(x=x, name="y", **options), x=x.shape)
    assert apply_rewrite(rule(max_parts=64), built).fired and not unsupported_ops(built)
    wide = torch.from_numpy(x).double()
    truth = wide.prod() if dim is None else wide.prod(dim)
    np.testing.assert_allclose(only_output(built, x, "float64"), truth.numpy(), rtol=1e-12)


@st.composite
def products(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=5)))
    axes = draw(st.none() | st.lists(st.sampled_from(range(-len(shape), len(shape))), min_size=1, max_size=4))
    return shape, {"keep_dims": draw(st.booleans()), **({} if axes is None else {"axes": axes})}


@pytest.mark.law
@given(products(), st.integers(0, 99))
def test_any_product_is_numpys_and_within_the_bound_in_fp16(drawn, seed):
    shape, options = drawn
    axes = sorted({axis % len(shape) for axis in options.get("axes", range(len(shape)))})
    options |= {"axes": axes} if "axes" in options else {}
    count = math.prod(shape[axis] for axis in axes)
    built = build_program(lambda x: mb.reduce_prod(x=x, name="y", **options), x=shape)
    found = apply_rewrite(rule(max_parts=16), built)
    assert bool(found.fired) == (count <= 16)
    x = numbers(shape, seed)
    truth = np.prod(x.astype(np.float64), axis=tuple(axes), keepdims=options["keep_dims"])
    np.testing.assert_allclose(only_output(built, x, "float64"), truth, rtol=1e-12)
    assert count > 16 or not kinds(built)["reduce_prod"]
    if count <= 16 and np.all(np.abs(truth) > 2.0**-13):
        half = only_output(built, x, "float16").astype(np.float64)
        assert np.all(np.abs(half - truth) <= max(count - 1, 1) / 2048 * 1.01 * np.abs(truth))


@pytest.mark.parametrize("extent", [2, 3, 7, 8])
def test_zeros_infinities_and_nan_come_out_as_numpy_has_them(extent):
    x = np.ones((6, extent), np.float16)
    x[0, -1], x[1, 0], x[2, 1], x[3, 0], x[3, 1], x[4, -1] = 0.0, -np.inf, np.nan, np.inf, 0.0, -0.0
    built = build_program(lambda x: mb.reduce_prod(x=x, axes=[1], name="y"), x=x.shape)
    apply_rewrite(rule(), built)
    with np.errstate(invalid="ignore"):
        truth = np.prod(x, axis=1)
    found = only_output(built, x, "float16")
    np.testing.assert_array_equal(found, truth)
    np.testing.assert_array_equal(np.signbit(found[[0, 1, 4]]), np.signbit(truth[[0, 1, 4]]))


def test_the_number_of_levels_is_logarithmic():
    built = build_program(lambda x: mb.reduce_prod(x=x, axes=[1], name="y"), x=(2, 1000))
    (miss,) = find_matches(rule(), built).near_misses
    assert miss.reason == "a product of 1000 elements, rounded 999 times; max_parts=8"
    apply_rewrite(rule(max_parts=1000), built)
    assert kinds(built)["split"] == 9 and kinds(built)["mul"] <= 18


def test_what_is_reduced_may_be_the_function_s_input_and_output_twice():
    def body(x):
        one = mb.reduce_prod(x=x, axes=[0], name="one")
        return [one, mb.reduce_prod(x=x, axes=[1], name="two"), mb.mul(x=one, y=one, name="three")]

    built = build_program(body, x=(4, 4))
    assert len(apply_rewrite(rule(), built).fired) == 2
    x = numbers((4, 4))
    found = Runtime(built, precision="float64")({"x": x})
    truth = x.astype(np.float64)
    np.testing.assert_allclose(found["one"], truth.prod(0), rtol=1e-12)
    np.testing.assert_allclose(found["two"], truth.prod(1), rtol=1e-12)
    np.testing.assert_allclose(found["three"], truth.prod(0) ** 2, rtol=1e-12)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(opset, tmp_path):
    built = build_program(lambda x: mb.reduce_prod(x=x, axes=[1], keep_dims=True, name="y"), opset=opset, x=(2, 6))
    loaded = reload_program(built, tmp_path / "m.mlpackage", opset, passes="product_by_parts")
    assert not kinds(loaded)["reduce_prod"] and not unsupported_ops(loaded) and not unsupported_ops(loaded, "m1")
    x = numbers((2, 6))
    np.testing.assert_allclose(only_output(loaded, x, "float64"), x.astype(np.float64).prod(1, keepdims=True))
