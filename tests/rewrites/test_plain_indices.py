"""ANE271: indices that cannot be negative are not wrapped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.rewrites.indexing.plain_indices import find_integer_bounds
from mil_ane_passes.runtime import Runtime
from tests.lab.versions.needs import coremltools_from
from tests.rewrites.helpers import kinds
from tests.rewrites.spellings import converted, grid, outputs, truth

TABLE = torch.arange(24, dtype=torch.float32).reshape(8, 3)


def largest(x):
    return torch.nn.functional.embedding(x.argmax(1), TABLE.to(x.dtype))


@coremltools_from("9.0", "does not wrap indices")
@pytest.mark.parametrize("target", ["iOS17", "iOS18"])
@pytest.mark.parametrize("way", ["traced", "exported"])
def test_indices_of_torch_are_used_as_they_are(way, target, tmp_path):
    built, x = converted(largest, way, tmp_path, target=target), grid()
    assert kinds(built)["gather"] and kinds(built)["greater_equal"]
    assert apply_rewrite(find_rewrite("plain_indices").configured(), built).fired
    assert not kinds(built).keys() & {"greater_equal", "select", "add"}
    np.testing.assert_array_equal(outputs(built, x, "float64"), truth(largest, x))


@coremltools_from("9.0", "rejects the _assert_tensor_metadata that torch.export writes")
def test_it_stands_through_a_conversion(tmp_path):
    built = converted(largest, "exported", tmp_path, passes="plain_indices")
    assert not kinds(built).keys() & {"greater_equal", "select"}


def wrapped(indices, many):
    return mb.select(cond=mb.greater_equal(x=indices, y=np.int32(0)), a=indices, b=mb.add(x=indices, y=np.int32(many)))


def test_positions_that_a_model_counts_are_never_negative():
    def body(x):
        ones = mb.cast(x=mb.not_equal(x=x, y=np.float16(0)), dtype="int32")
        places = mb.add(x=mb.mul(x=mb.cumsum(x=ones, axis=1), y=ones), y=np.int32(1))
        return mb.gather(x=make_weight(16, 3), indices=wrapped(places, 16), axis=0, name="y")

    built = build_program(body, x=(2, 8))
    assert find_integer_bounds(built.functions["main"].outputs[0].op.indices.op.a) == (1, 9)
    assert apply_rewrite(find_rewrite("plain_indices").configured(), built).fired and not kinds(built)["select"]


@pytest.mark.parametrize("made", [lambda i: i, lambda i: mb.sub(x=mb.maximum(x=i, y=np.int32(0)), y=np.int32(1)),
                                  lambda i: mb.mul(x=mb.maximum(x=i, y=np.int32(0)), y=np.int32(3))],
                         ids=["an input", "one less", "an overflow"])
def test_what_may_be_negative_is_wrapped(made):
    built = build_program(
        lambda i: mb.gather(x=make_weight(8, 3), indices=wrapped(made(i), 8), axis=0), dtype=types.int32, i=(4,)
    )
    trace = find_matches(find_rewrite("plain_indices").configured(), built)
    assert [miss.reason for miss in trace.near_misses] == ["its indices may be negative"]


def count_in_loop(dtype=np.int32, start=0, step=1, end=5, compared="less", more=None):
    """Add up rows of a table at the counter of a loop, whose ops are those of coremltools' recurrent layers."""
    def run(i, total):
        places = i if dtype == np.int32 else mb.cast(x=i, dtype="int32")
        row = mb.gather(x=make_weight(8, 3), indices=wrapped(places, 8), axis=0)
        return mb.add(x=i, y=np.array([step], dtype)), mb.add(x=total, y=row)

    def check(i, total):
        going = getattr(mb, compared)(x=i, y=np.array([end], dtype))
        return going if more is None else getattr(mb, more)(x=going, y=mb.greater(x=i, y=np.array([-9], dtype)))

    return lambda x: mb.while_loop(_cond=check, _body=run, loop_vars=(np.array([start], dtype), x), name="y")


@pytest.mark.parametrize("settings", [
    {}, {"dtype": np.float32}, {"dtype": np.float16}, {"start": 1, "step": 2}, {"compared": "less_equal"},
    {"dtype": np.float32, "end": 4.5}, {"more": "logical_and"}],
    ids=["int32", "fp32", "fp16", "by two", "to the end", "to a half", "with more"])
def test_the_counter_of_a_loop_is_an_index(settings):
    built, x = build_program(count_in_loop(**settings), x=(1, 3)), np.ones((1, 3), np.float16)
    before = Runtime(built, precision="float16")({"x": x})
    assert apply_rewrite(find_rewrite("plain_indices").configured(), built).fired and not kinds(built)["select"]
    for name, after in Runtime(built, precision="float16")({"x": x}).items():
        np.testing.assert_array_equal(after, before[name])


@pytest.mark.parametrize("settings", [
    {"start": -1}, {"step": -1, "start": 5, "compared": "greater", "end": -3}, {"more": "logical_or"},
    {"dtype": np.float32, "step": 0.5, "start": 0.5}, {"dtype": np.float16, "end": 4096}],
    ids=["from -1", "downwards", "or more", "by halves", "beyond what fp16 counts"])
def test_a_counter_that_may_be_no_index_is_wrapped(settings):
    built = build_program(count_in_loop(**settings), x=(1, 3))
    trace = find_matches(find_rewrite("plain_indices").configured(), built)
    assert "its indices may be negative" in [miss.reason for miss in trace.near_misses]


@st.composite
def arithmetic(draw):
    """A small tree of integer ops over the input, as a function."""
    if draw(st.integers(0, 3)) == 0:
        number = draw(st.integers(-9, 9))
        return lambda x: mb.add(x=mb.mul(x=x, y=np.int32(0)), y=np.int32(number))
    kind = draw(st.sampled_from(["x", "add", "sub", "mul", "minimum", "maximum", "floor_div", "mod", "narrow", "sums"]))
    if kind == "x":
        return lambda x: x
    one = draw(arithmetic())
    if kind == "narrow":
        return lambda x: mb.cast(x=mb.cast(x=one(x), dtype="int16"), dtype="int32")
    if kind == "sums":
        return lambda x: mb.cumsum(x=one(x), axis=0)
    if kind in ("floor_div", "mod"):
        by = draw(st.integers(1, 9))
        return lambda x: getattr(mb, kind)(x=mb.maximum(x=one(x), y=np.int32(0)), y=np.int32(by))
    other = draw(arithmetic())
    return lambda x: getattr(mb, kind)(x=one(x), y=other(x))


@pytest.mark.law
@given(arithmetic(), st.integers(0, 9))
def test_the_bounds_hold_what_is_computed(make, seed):
    def body(i):
        small = mb.cast(x=mb.cast(x=i, dtype="int8"), dtype="int32")
        places = make(small)
        return [places, mb.select(cond=mb.greater_equal(x=places, y=np.int32(0)), a=places,
                                  b=mb.add(x=places, y=np.int32(1)))]

    built = build_program(body, dtype=types.int32, i=(6,))
    given_, wrapped_ = (var.name for var in built.functions["main"].outputs)
    low, high = find_integer_bounds(built.functions["main"].outputs[0])
    x = np.random.default_rng(seed).integers(-100, 100, 6).astype(np.int32)
    before = Runtime(built, precision="float16")({"i": x})
    assert low <= before[given_].min() and before[given_].max() <= high
    apply_rewrite(find_rewrite("plain_indices").configured(), built)
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"i": x})[wrapped_], before[wrapped_])
