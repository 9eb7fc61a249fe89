"""ANE205: the running sums of PyTorch, by convs with ones or a triangle."""

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

from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model, load_converted
from tests.rewrites.helpers import configure_rewrite, kinds, only_output, unsupported_ops
from tests.rewrites.spellings import WAYS, converted, outputs, spelt, truth

SPELLINGS = {
    "seed": lambda x: torch.cumsum(x, dim=-1) + 1,
    "along time": lambda x: torch.cumsum(x, 1) * 2,
    "first axis": lambda x: x.cumsum(0),
    "backwards": lambda x: torch.flip(torch.cumsum(torch.flip(x, [1]), 1), [1]),
    "of a mask": lambda x: (x > 0).float().cumsum(2),
    "long": lambda x: torch.cumsum(x.reshape(1, -1), -1),
}


rule = partial(configure_rewrite, "triangle_cumsum")


def cumsum(shape, dtype=types.fp16, **asked):
    return build_program(lambda x: mb.cumsum(x=x, name="y", **asked), dtype=dtype, x=tuple(shape))


def torch_cumsum(x, axis, exclusive=False, reverse=False):
    """What MIL's documentation says in terms of torch.cumsum."""
    x = torch.from_numpy(np.asarray(x, np.float64))
    x = x.flip(axis) if reverse else x
    total = x.cumsum(axis)
    if exclusive:
        total = torch.cat([torch.zeros_like(total.narrow(axis, 0, 1)), total.narrow(axis, 0, x.shape[axis] - 1)], axis)
    return (total.flip(axis) if reverse else total).numpy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_found_as_torch_spells_it(spelling, way, tmp_path):
    function, x = SPELLINGS[spelling], np.random.default_rng(0).standard_normal((2, 40, 5)).astype(np.float32)
    plain = converted(function, way, tmp_path, shape=x.shape)
    assert kinds(plain)["cumsum"] == 1 and "cumsum" in unsupported_ops(plain)
    built = converted(function, way, tmp_path, shape=x.shape, passes="triangle_cumsum")
    assert not kinds(built)["cumsum"] and not unsupported_ops(built) and not unsupported_ops(built, "m1")
    np.testing.assert_allclose(outputs(built, x, "float64"), truth(function, x), rtol=0, atol=1e-12)
    right = truth(function, x.astype(np.float16))
    np.testing.assert_allclose(outputs(built, x, "float16"), right, rtol=0, atol=4e-3 * np.abs(right).max())


@pytest.mark.parametrize("length", [7, 100, 500])
def test_the_seeds_complaint_at_flexible_shapes(length):
    """cumsum(x, -1) + 1, which left the ANE whether or not the shape was fixed."""
    built = convert_model(spelt(SPELLINGS["seed"]), torch.zeros(1, 9), names="x", shapes=[(1, ct.RangeDim(1, 512))],
                          passes="triangle_cumsum{longest=512}")._mil_program
    assert "cumsum" not in kinds(built)
    x = np.random.default_rng(length).standard_normal((1, length)).astype(np.float32)
    np.testing.assert_allclose(outputs(built, x, "float64"), truth(SPELLINGS["seed"], x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18])
def test_it_is_built_in_every_opset_and_stands_in_the_package(tmp_path, target):
    loaded = load_converted(spelt(SPELLINGS["seed"]), torch.zeros(2, 200), path=tmp_path / "m.mlpackage",
                            passes="triangle_cumsum", minimum_deployment_target=target)
    assert kinds(loaded)["conv"] == 3 and not unsupported_ops(loaded)
    assert not find_matches(rule(), loaded).fired


@st.composite
def asked(draw):
    rank = draw(st.integers(1, 5))
    axis = draw(st.integers(0, rank - 1))
    shape = [draw(st.integers(1, 3)) for _ in range(rank)]
    shape[axis] = draw(st.integers(1, 300))
    spelt_axis = -1 if axis == rank - 1 and draw(st.booleans()) else axis
    return shape, {"axis": spelt_axis, "exclusive": draw(st.booleans()), "reverse": draw(st.booleans())}


@pytest.mark.law
@given(asked(), st.sampled_from(["windows", "triangle"]), st.sampled_from([13, 15]), st.integers(0, 2**32 - 1))
def test_law_any_cumsum_is_that_of_torch(drawn, form, widest, seed):
    """At float64 to rounding; in fp16 within 2^-11 of the sum of magnitudes, for each of up to four roundings."""
    shape, options = drawn
    built = cumsum(shape, **options)
    assert apply_rewrite(rule(form=form), built, target="m4" if widest == 15 else "all").fired
    assert not kinds(built)["cumsum"] and not unsupported_ops(built)
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    right = torch_cumsum(x, **options)
    np.testing.assert_allclose(only_output(built, x, "float64"), right, rtol=0, atol=1e-11)
    error = np.abs(only_output(built, x, "float16") - right)
    convs = 1 if form == "triangle" else kinds(built)["conv"]
    assert np.all(error <= convs * 2.0**-11 * 1.01 * torch_cumsum(np.abs(x), **options) + 2.0**-24 * convs)


@pytest.mark.law
@given(asked(), st.integers(0, 2**32 - 1))
def test_law_what_is_not_finite_reaches_the_sums_that_hold_it_only(drawn, seed):
    shape, options = drawn
    random = np.random.default_rng(seed)
    drawn_from = np.array([1, -2, 0.5, np.inf, -np.inf, np.nan], np.float16)
    x = random.choice(drawn_from, shape, p=[0.4, 0.3, 0.24, 0.02, 0.02, 0.02])
    built = cumsum(shape, **options)
    assert apply_rewrite(rule(), built).fired
    for precision in ("float64", "float16"):
        np.testing.assert_array_equal(only_output(built, x, precision), torch_cumsum(x, **options))


@pytest.mark.law
@given(st.integers(1, 120), st.integers(1, 120), st.integers(0, 2), st.booleans(), st.booleans())
def test_law_any_length_up_to_the_longest(count, longest, axis, exclusive, reverse):
    longest = max(count, longest)
    shape, options = [2, 3, 2], {"axis": axis, "exclusive": exclusive, "reverse": reverse}
    shape[axis] = None
    built = cumsum(shape, **options)
    assert apply_rewrite(rule(longest=longest), built).fired and not kinds(built)["cumsum"]
    shape[axis] = count
    x = np.random.default_rng(count).standard_normal(shape).astype(np.float16)
    np.testing.assert_allclose(only_output(built, x, "float64"), torch_cumsum(x, **options), rtol=0, atol=1e-11)


def test_several_symbolic_axes_beside():
    x = np.random.default_rng(0).standard_normal((2, 6, 3)).astype(np.float16)
    for axis, shape in ((1, (None, 6, None)), (2, (None, None, 3)), (0, (2, None, 3))):
        built = cumsum(shape, axis=axis)
        assert apply_rewrite(rule(), built).fired
        np.testing.assert_allclose(only_output(built, x, "float64"), torch_cumsum(x, axis), rtol=0, atol=1e-12)
    for shape, axis in (((None, 60, None), 1), ((None, 2, None, 60, 3), 3)):
        assert [near.reason for near in find_matches(rule(), cumsum(shape, axis=axis)).near_misses] == [
            "2 axes are symbolic: a reshape cannot distinguish them"]


def test_what_cannot_be_laid_out_is_refused_with_the_numbers():
    assert [near.reason for near in find_matches(rule(), cumsum((20000,), axis=0)).near_misses] == [
        "20000 elements, 1 apart, do not fit on two axes of up to 16384"]
    assert find_matches(rule(), cumsum((20000,), axis=0), target="m4").fired
    assert [near.reason for near in find_matches(rule(), cumsum((20, 9000), axis=0)).near_misses] == [
        "20 elements, 9000 apart, do not fit on two axes of up to 16384"]


def test_a_batch_of_more_than_the_ane_takes_is_refused():
    assert [near.reason for near in find_matches(rule(), cumsum((300, 300, 2, 5), axis=3)).near_misses] == [
        "laid out as 90000x2x1x5, above 65536x65536x16384x16384"]


def test_a_mask_takes_the_triangle_where_that_is_no_larger():
    """The triangle is exact for counts: one product and one rounding."""
    def counted(x):
        return mb.cumsum(x=mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="fp16"), axis=1, name="y")

    def laid_out(x):
        mask = mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="fp16")
        return mb.cumsum(x=mb.transpose(x=mb.expand_dims(x=mask, axes=[0]), perm=[2, 0, 1]), axis=2, name="y")

    built = build_program(laid_out, x=(8, 8))
    apply_rewrite(rule(), built)
    assert kinds(built)["matmul"] == 1
    for shape, product in (((8, 8), True), ((4, 8), False), ((None, 8), False)):
        built = build_program(counted, x=shape)
        apply_rewrite(rule(), built)
        assert bool(kinds(built)["matmul"]) is product and not kinds(built)["cumsum"]


def test_ones_are_shared_and_bounded():
    def body(x):
        return [mb.cumsum(x=x, axis=2, name="a"), mb.cumsum(x=x, axis=2, reverse=True, name="b")]

    built = build_program(body, x=(2, 64, 100))
    apply_rewrite(rule(), built)
    ones = [op for _, op in iterate_ops(built) if op.op_type == "const" and np.ndim(op.outputs[0].val) == 4]
    assert kinds(built)["conv"] == 4 and len(ones) == 2
    built = build_program(body, x=(2, 64, 100))
    apply_rewrite(rule(max_bytes=100), built)
    ones = [op for _, op in iterate_ops(built) if op.op_type == "const" and np.ndim(op.outputs[0].val) == 4]
    assert sum(op.outputs[0].val.nbytes for op in ones) == 40


def test_integers_stay_whole():
    """Counts up to 2048 are exact in every form."""
    x = np.ones((1, 2048), np.float16)
    for longest, shape in ((0, x.shape), (2048, (1, None))):
        built = cumsum(shape, axis=1)
        apply_rewrite(rule(longest=longest), built)
        found = Runtime(built, precision="float16")({"x": x})["y"]
        np.testing.assert_array_equal(found, np.arange(1, 2049)[None])
