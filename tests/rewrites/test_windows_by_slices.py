"""ANE211: the windows of torch's unfold and of TensorFlow's frame, cut out by slices."""

from __future__ import annotations

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

rule = partial(configure_rewrite, "windows_by_slices")


def windows(shape, axis, size, stride, **settings):
    return build_program(lambda x: mb.sliding_windows(x=x, axis=axis, size=size, stride=stride, name="y"), x=shape,
                         **settings)


def unfolded(x, axis, size, stride):
    """PyTorch's windows, with their elements behind the axis as MIL has them."""
    axis %= x.ndim
    return torch.from_numpy(x).unfold(axis, size, stride).movedim(-1, axis + 1).numpy()


@st.composite
def cuts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    axis = draw(st.integers(0, len(shape)))
    extent = draw(st.integers(1, 24))
    size = draw(st.integers(1, extent))
    shape = (*shape[:axis], extent, *shape[axis:])
    return shape, axis - draw(st.sampled_from([0, len(shape)])), size, draw(st.integers(1, 9))


@pytest.mark.law
@given(cuts())
def test_any_windows_are_torchs_to_the_bit(drawn):
    shape, axis, size, stride = drawn
    built = windows(*drawn)
    if len(shape) == 1 and axis < 0:
        axis = -1
    assert apply_rewrite(rule(), built).fired and not kinds(built)["sliding_windows"]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    x.flat[::5], x.flat[1::5], x.flat[2::7] = np.inf, np.nan, -0.0
    found, truth = only_output(built, x, "float16"), unfolded(x, axis, size, stride)
    assert found.shape == truth.shape
    np.testing.assert_array_equal(found, truth)
    assert np.array_equal(np.signbit(found), np.signbit(truth))
    rows = -(-size // stride) if stride > 1 else size
    assert kinds(built)["slice_by_index"] <= min((x.shape[axis] - size) // stride + 1, rows) + 2


@pytest.mark.parametrize("target", ["m1", "m4"])
@pytest.mark.parametrize("drawn", [((1, 64, 256), 2, 8, 4), ((3, 40), 1, 8, 8), ((2, 50, 3), 1, 3, 1)])
def test_nothing_is_left_that_is_refused(drawn, target):
    built = windows(*drawn)
    assert unsupported_ops(built, target) == ["sliding_windows"]
    assert apply_rewrite(rule(), built, target=target).fired and not unsupported_ops(built, target)


def test_windows_edge_to_edge_are_one_reshape():
    built = windows((2, 12), 1, 4, 4)
    apply_rewrite(rule(), built)
    assert {kind: count for kind, count in kinds(built).items() if kind != "const"} == {"reshape": 1}


def test_a_symbolic_batch_stays_symbolic_and_two_are_stacked_instead_of_reshaped():
    built = windows((None, 12, None), 1, 4, 4)
    apply_rewrite(rule(), built)
    assert kinds(built)["stack"] == 1 and not kinds(built)["reshape"]
    x = np.arange(2 * 12 * 5, dtype=np.float16).reshape(2, 12, 5)
    np.testing.assert_array_equal(only_output(built, x, "float16"), unfolded(x, 1, 4, 4))


def test_the_option_bounds_the_slices():
    built = windows((100,), 0, 30, 3)
    (miss,) = find_matches(rule(max_parts=9), built).near_misses
    assert miss.reason == "24 windows of 30 elements: 10 slices, above max_parts=9"
    assert apply_rewrite(rule(max_parts=10), built).fired and kinds(built)["slice_by_index"] == 11


def test_windows_of_windows_of_one_value_that_is_read_twice():
    def body(x):
        first = mb.sliding_windows(x=x, axis=1, size=3, stride=2, name="one")
        again = mb.sliding_windows(x=first, axis=2, size=2, stride=1, name="two")
        return [first, again, mb.sliding_windows(x=x, axis=1, size=3, stride=2, name="three")]

    built = build_program(body, x=(2, 9))
    assert len(apply_rewrite(rule(), built).fired) == 3
    x = np.arange(18, dtype=np.float16).reshape(2, 9)
    found = Runtime(built, precision="float16")({"x": x})
    first = unfolded(x, 1, 3, 2)
    np.testing.assert_array_equal(found["one"], first)
    np.testing.assert_array_equal(found["two"], unfolded(first, 2, 2, 1))
    np.testing.assert_array_equal(found["three"], first)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(opset, tmp_path):
    built = windows((1, 3, 20), 2, 6, 3, opset=opset)
    loaded = reload_program(built, tmp_path / "m.mlpackage", opset, passes="windows_by_slices")
    assert not kinds(loaded)["sliding_windows"] and not unsupported_ops(loaded, "m4")
    x = np.arange(60, dtype=np.float16).reshape(1, 3, 20)
    np.testing.assert_array_equal(only_output(loaded, x, "float16"), unfolded(x, 2, 6, 3))
