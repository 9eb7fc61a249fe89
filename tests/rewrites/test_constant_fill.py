"""ANE206: fills as constants, and as zeros of dynamic size."""

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
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model, reload_program
from tests.rewrites.helpers import configure_rewrite, kinds, unsupported_ops
from tests.rewrites.spellings import WAYS, converted, outputs, spelt, truth
from tests.rewrites.test_generated import drawn, flexible

FLEXIBLE = {
    "ones": lambda x: torch.ones(x.shape[0], x.shape[1]) * x,
    "zeros joined": lambda x: torch.cat([x, torch.zeros(x.shape[0], 5)], 1),
    "new_full": lambda x: x.new_full((x.shape[0], 3), 2.0) * x[:, :1],
    "a plane": lambda x: torch.full((1, x.shape[1], 2, x.shape[0]), -0.5).sum((0, 2)),
}


rule = partial(configure_rewrite, "constant_fill")


def misses(built, target="all", **options):
    return [near.reason for near in find_matches(rule(**options), built, target=target).near_misses]


@pytest.mark.parametrize("spelling", FLEXIBLE)
def test_the_seeds_complaint_fill_at_flexible_shapes(spelling):
    function = FLEXIBLE[spelling]
    assert "fill" in kinds(flexible(function, "last_axis_slice"))
    built = flexible(function, "constant_fill")
    assert not {"fill", "shape", "gather"} & set(kinds(built))
    assert not unsupported_ops(built) and not unsupported_ops(built, "m1")
    for shape in ((1, 1), (3, 64), (64, 5)):
        x = drawn(shape).astype(np.float16).astype(np.float32)
        np.testing.assert_allclose(outputs(built, x, "float64"), truth(function, x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_the_seeds_complaint_fill_like_at_fixed_shapes(way, tmp_path):
    def function(x):
        return torch.cat([x, torch.full_like(x, 0.25)], -1)

    built = converted(function, way, tmp_path, passes="constant_fill")
    assert not kinds(built)["fill_like"] and not kinds(built)["fill"] and not unsupported_ops(built, "m1")
    x = drawn((2, 8, 4)).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x))


def test_the_seeds_complaint_fill_like_at_flexible_shapes():
    """On chips before the M4 zeros of that size and the number; where it is only added, one element on all."""
    def joined(x):
        return torch.cat([x, torch.full_like(x, 0.25)], -1)

    for target, left in (("m1", 0), ("m4", 1), ("all", 1)):
        built = convert_model(spelt(joined), torch.zeros(4, 4), names="x", shapes=[(ct.RangeDim(1, 9), 4)],
                              passes="constant_fill", chip=target,
                              minimum_deployment_target=ct.target.iOS16)._mil_program
        assert kinds(built)["fill_like"] == left
        if not left:
            assert not unsupported_ops(built, "m1")
            x = drawn((7, 4)).astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(outputs(built, x, "float16"), truth(joined, x))
    built = flexible(lambda x: torch.full_like(x, 0.25) - x, "constant_fill")
    assert not kinds(built)["fill_like"] and kinds(built)["sub"] == 1


def test_the_seeds_complaint_fill_at_fixed_shapes(tmp_path):
    """In a package that was saved with it; coremltools folds it on the way there otherwise."""
    built = build_program(lambda x: mb.concat(values=[x, mb.fill(shape=[2, 3], value=np.float16(7))], axis=1, name="y"),
                          x=(2, 3))
    assert "fill" in kinds(reload_program(built, tmp_path / "before.mlpackage"))
    ane.rewrite(tmp_path / "before.mlpackage", tmp_path / "after.mlpackage", passes="constant_fill")
    after = ane.load(tmp_path / "after.mlpackage").program
    x = drawn((2, 3)).astype(np.float16)
    right = torch.cat([torch.from_numpy(x), torch.full((2, 3), 7.0)], 1).numpy()
    np.testing.assert_array_equal(outputs(after, x, "float16"), right)
    assert kinds(after) == {"const": kinds(after)["const"], "concat": 1}


@st.composite
def fills(draw):
    """A rank, which axes are known at run time only, and a number of some type."""
    extents = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    free = [draw(st.booleans()) for _ in extents]
    number = draw(st.sampled_from([0.0, -0.0, 1.5, -65504.0, np.inf, -np.inf, np.nan]))
    dtype = draw(st.sampled_from([np.float16, np.float32, np.bool_]))
    return extents, free, dtype(number)


@pytest.mark.law
@given(fills())
def test_law_the_same_bits_whatever_the_value_holds_that_the_size_is_from(drawn_fill):
    extents, free, number = drawn_fill
    symbolic = tuple(None if each else extent for extent, each in zip(extents, free))
    built = build_program(lambda x: [mb.relu(x=x, name="r"), mb.identity(
        x=mb.fill_like(ref_tensor=x, value=number), name="y")], x=symbolic)
    assert apply_rewrite(rule(always=True), built).fired and not kinds(built)["fill_like"]
    assert number.dtype == np.float32 or not unsupported_ops(built)  # fp32 leaves the ANE whatever computes with it
    x = np.random.default_rng(0).choice(np.array([0, 3, np.inf, -np.inf, np.nan], np.float16), extents)
    for precision in ("float16", "float64"):
        found = Runtime(built, precision=precision)({"x": x})["y"]
        right = np.full(extents, number)
        np.testing.assert_array_equal(found, right.astype(found.dtype))
        if number.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(found), np.signbit(right))


READERS = {
    "full": (lambda x, f: mb.mul(x=f, y=x, name="y"), (3, 4), True),
    "chosen": (lambda x, f: mb.select(cond=mb.greater(x=x, y=np.float16(0)), a=x, b=f, name="y"), (3, 4), True),
    "compared": (lambda x, f: mb.cast(x=mb.less(x=f, y=x), dtype="fp16", name="y"), (3, 4), True),
    "a row only": (lambda x, f: mb.add(x=mb.slice_by_index(x=x, begin=[0, 0], end=[1, 4]), y=f, name="y"),
                   (3, 4), False),
    "itself": (lambda x, f: mb.add(x=f, y=f, name="y"), (3, 4), False),
    "joined": (lambda x, f: mb.concat(values=[x, f], axis=0, name="y"), (3, 4), False),
    "neither": (lambda x, f: mb.select(cond=mb.greater(x=x, y=np.float16(0)), a=np.float16(1), b=f, name="y"),
                (3, 4), False),
    "both ways": (lambda x, f: mb.add(x=mb.mul(x=x, y=f), y=mb.reduce_sum(x=f, axes=[0], keep_dims=True), name="y"),
                  (3, 4), False),
}


@pytest.mark.parametrize("case", READERS)
def test_one_element_only_where_every_reader_has_its_shape_from_elsewhere(case):
    reader, shape, one = READERS[case]
    built = build_program(lambda x: reader(x, mb.fill(shape=list(shape), value=np.float16(-2))), x=shape)
    x = drawn(shape).astype(np.float16)
    before = Runtime(built, precision="float16")({"x": x})["y"]
    (hit,) = apply_rewrite(rule(), built).fired
    assert ("one element" in hit.reason) is one, hit.reason
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], before)


def test_two_fills_at_one_reader_and_equal_fills():
    def body(x):
        low, high = (mb.fill_like(ref_tensor=x, value=np.float16(each)) for each in (-1, 1))
        chosen = mb.select(cond=mb.greater(x=x, y=np.float16(0)), a=high, b=low, name="sign")
        clipped = mb.minimum(x=mb.maximum(x=x, y=low), y=high, name="clipped")
        return [chosen, clipped]

    built = build_program(body, x=(64, 64))
    assert len(apply_rewrite(rule(), built).fired) == 2 and not kinds(built)["fill_like"]
    held = [op.outputs[0].val.nbytes for _, op in iterate_ops(built) if op.op_type == "const"
            and np.size(op.outputs[0].val) == 64 * 64]
    assert len(held) == 2  # one of each number: the select has its shape from them
    x = drawn((64, 64)).astype(np.float16)
    found = Runtime(built, precision="float16")({"x": x})
    np.testing.assert_array_equal(found["sign"], torch.where(torch.from_numpy(x) > 0, 1, -1).numpy())
    np.testing.assert_array_equal(found["clipped"], torch.from_numpy(x).clip(-1, 1).numpy())


def test_what_it_does_not_reach():
    def sized(function, dtype=types.fp16, number=None):
        def body(x):
            rows = mb.gather(x=mb.shape(x=x), indices=np.array([0], np.int32), axis=0)
            filled = mb.fill(shape=mb.concat(values=[function(rows), np.array([3], np.int32)], axis=0),
                             value=np.float16(1) if number is None else number)
            return [mb.identity(x=x), mb.identity(x=filled, name="y")]

        return build_program(body, dtype=dtype, x=(None, 4))

    assert misses(sized(lambda rows: mb.mul(x=rows, y=2))) == [
        "its shape is computed, but not from the shapes of other values"]
    assert misses(sized(lambda rows: rows, number=np.int32(1))) == [
        "integers of dynamic size, which is unsupported on the ANE"]
    built = build_program(lambda x: mb.identity(x=mb.fill_like(ref_tensor=x, value=np.float16(1)), name="y"), x=(2, 3))
    fired = {
        target: bool(find_matches(rule(), built, target=target).fired) for target in ("m1", "m3", "m4", "m6", "all")
    }
    assert fired == {"m1": True, "m3": True, "m4": False, "m6": False, "all": True}


def test_an_output_of_the_function_stays_one():
    built = build_program(lambda x: [mb.relu(x=x), mb.fill(shape=[2, 2], value=np.float16(3), name="y")], x=(2,))
    apply_rewrite(rule(), built)
    assert [var.name for var in built.functions["main"].outputs][-1] == "y"
    found = Runtime(built, precision="float16")({"x": np.zeros(2, np.float16)})["y"]
    np.testing.assert_array_equal(found, torch.full((2, 2), 3.0).numpy())


def test_a_fill_in_the_size_of_another_fill():
    """A causal mask: ones, cut to a triangle, in the size of zeros in the size of the scores."""
    def build(x):
        zeros = mb.fill_like(ref_tensor=x, value=np.float16(0))
        ones = mb.fill(shape=mb.shape(x=zeros), value=np.float16(1))
        more = mb.fill_like(ref_tensor=ones, value=np.float16(2))
        return [mb.transpose(x=each, perm=[1, 0]) for each in (zeros, ones, more)]

    built = build_program(build, x=(None, None))
    assert not apply_rewrite(rule(always=True), built, target="m1").failed
    assert not {"fill", "fill_like"} & set(kinds(built))
    found = Runtime(built, precision="float16")({"x": np.full((2, 3), np.nan, np.float16)})
    assert [each.tolist() for each in found.values()] == [np.full((3, 2), number).tolist() for number in range(3)]
