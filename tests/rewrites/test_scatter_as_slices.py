"""ANE213: assignments to constant places as PyTorch and NumPy make them, without a scatter."""

from __future__ import annotations

import operator

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, fixes_for, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds
from tests.rewrites.spellings import converted, grid, outputs, truth

KINDS = {"scatter", "scatter_nd", "scatter_along_axis"}


def added(x):
    x = x * 1
    x[..., -1] += 1
    return x


def window(x):
    y = x * 2
    y[:, 2:5] = x[:, :3]
    return y


def every_second(x):
    y = x * 2
    y[:, 1::2, 1:3] = x[:, :4, 2:]
    return y


def cleared(x):
    y = x * 2
    y[:, 1:6:2] = 0.0
    return y


def corner(x):
    y = x * 2
    y[0, 3] = x[1, 2]
    return y


def chained(x):
    y = x * 2
    y[:, 0] = x[:, 7]
    y[..., 1] -= x[..., 2]
    return y


ASSIGNED = [added, window, every_second, cleared, corner, chained]


def fires(built, target="all", **options):
    rule = find_rewrite("scatter_as_slices").configured(**options)
    return [finding.op for finding in apply_rewrite(rule, built, target=target).fired]


def refused(built, target):
    plan, _ = predict_plan(built, [rule() for rule in get_all_rules().values()], target=target)
    return [(row.op.op_type, row.ane) for row in plan.rows if row.ane == "no" and row.op.op_type != "cast"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", [
    "iOS15", pytest.param("iOS16", marks=pytest.mark.slow), pytest.param("iOS17", marks=pytest.mark.slow), "iOS18"])
@pytest.mark.parametrize("function", ASSIGNED, ids=lambda function: function.__name__)
def test_an_assignment_to_a_slice_needs_no_scatter(function, target, tmp_path):
    built, x = converted(function, "exported", tmp_path, target=target), grid()
    assert bool(kinds(built).keys() & KINDS) == (target != "iOS18")
    assert fires(built, windows=True)
    assert not kinds(built).keys() & {*KINDS, "slice_update"}
    assert not refused(built, "m4") and not refused(built, "m1")
    np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x).astype(np.float16))


@pytest.mark.parametrize("function", [window, cleared, corner], ids=lambda function: function.__name__)
def test_traced_likewise(function, tmp_path):
    built, x = converted(function, "traced", tmp_path), grid()
    assert kinds(built)["scatter"] and fires(built) and not kinds(built).keys() & KINDS
    np.testing.assert_array_equal(outputs(built, x, "float64"), truth(function, x))


def test_the_last_of_each_row_is_one_select(tmp_path):
    built = converted(added, "exported", tmp_path, passes="scatter_as_slices", shape=(2, 8, 4))
    assert kinds(built)["select"] == 2 and not kinds(built).keys() & {"reshape", "split", "concat"}


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
def test_it_stands_through_a_conversion_and_the_package(target, tmp_path):
    function, x = every_second, grid()
    built = converted(function, "exported", tmp_path, passes="scatter_as_slices{windows=true}", target=target)
    assert not kinds(built).keys() & {*KINDS, "slice_update"}
    np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x).astype(np.float16))


COMBINE = {
    "update": lambda old, new: new, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "div": operator.truediv, "max": np.maximum, "min": np.minimum,
}


def applied(x, places, updates, mode):
    """What NumPy makes of it; `places` index `x`."""
    result = x.copy()
    with np.errstate(all="ignore"):
        result[places] = COMBINE[mode](x[places], updates)
    return result


def held(built, x, updates, right, mode):
    for precision in ("float64", "float16"):
        found = Runtime(built, precision=precision)({"x": x, "v": updates} if updates is not None else {"x": x})["y"]
        np.testing.assert_array_equal(found.astype(np.float16), right)
    if mode not in ("max", "min"):
        np.testing.assert_array_equal(np.signbit(found) & ~np.isnan(found), np.signbit(right) & ~np.isnan(right))


def special(shape, seed=0):
    x = np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float16)
    x.reshape(-1)[:3] = [np.nan, -0.0, np.inf][: x.size]
    return np.roll(x, seed)


@st.composite
def rows(draw):
    """A shape, one of its axes, and places of it, each once."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    extent = shape[axis] = draw(st.integers(1, 9))
    places = draw(st.one_of(
        st.lists(st.integers(0, extent - 1), min_size=1, unique=True),
        st.builds(lambda start, step: list(range(start, extent, step)), st.integers(0, extent - 1), st.integers(1, 4))))
    return shape, axis, np.array([place - extent * draw(st.booleans()) for place in places], np.int32)


@pytest.mark.law
@given(rows(), st.sampled_from(sorted(COMBINE)), st.booleans())
def test_any_rows_of_an_axis(drawn, mode, constant):
    shape, axis, places = drawn
    x, wanted = special(shape), list(shape)
    wanted[axis] = len(places)
    updates = special(wanted, 1)
    inputs = {"x": tuple(shape)} | ({} if constant else {"v": tuple(wanted)})
    built = build_program(
        lambda x, v=updates: mb.scatter(data=x, indices=places, updates=v, axis=axis, mode=mode, name="y"), **inputs
    )
    at = (slice(None),) * (axis % len(shape)) + (places,)
    assert fires(built, max_parts=99) == ["scatter"] and not kinds(built)["scatter"]
    held(built, x, None if constant else updates, applied(x, at, updates, mode), mode)


@st.composite
def windows(draw):
    """A shape, and what NumPy calls a slice of it along each axis."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return shape, tuple(slice(draw(st.integers(0, extent - 1)), None, draw(st.integers(1, 3))) for extent in shape)


@pytest.mark.law
@given(windows(), st.sampled_from(sorted(COMBINE)), st.sampled_from(["flat", "between reshapes", "points", "rows"]))
def test_any_window(drawn, mode, form):
    shape, window = drawn
    x = special(shape)
    places = np.arange(x.size, dtype=np.int32).reshape(shape)[window]
    updates = special(places.shape, 1)
    points = np.stack(np.unravel_index(places, shape), -1).astype(np.int32)

    def body(x, v):
        if form == "flat":
            return mb.scatter(data=x, indices=places.reshape(-1), updates=v, mode=mode, name="y")
        if form == "between reshapes":
            line = mb.reshape(x=x, shape=[-1])
            line = mb.scatter(data=line, indices=places.reshape(-1), updates=mb.reshape(x=v, shape=[-1]), mode=mode)
            return mb.reshape(x=line, shape=shape, name="y")
        where, new = (points, v) if form == "points" else (points.reshape(-1, len(shape)), mb.reshape(x=v, shape=[-1]))
        return mb.scatter_nd(data=x, indices=where, updates=new, mode=mode, name="y")

    flat = form == "flat"
    built = build_program(body, x=(x.size,) if flat else tuple(shape), v=(updates.size,) if flat else updates.shape)
    if points.ndim > 5:
        return
    assert fires(built, max_parts=999) and not kinds(built).keys() & KINDS
    assert not refused(built, "m4")
    right = applied(x, window, updates, mode)
    held(built, x.reshape(-1) if flat else x, updates.reshape(-1) if flat else updates,
         right.reshape(-1) if flat else right, mode)


@pytest.mark.law
@given(st.data(), st.integers(0, 2), st.sampled_from(sorted(COMBINE)))
def test_any_places_along_an_axis(data, axis, mode):
    shape = [data.draw(st.integers(1, 4)) for _ in range(3)]
    count = data.draw(st.integers(1, shape[axis]))
    line = np.arange(shape[axis]).reshape([-1 if each == axis else 1 for each in range(3)])
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permuted(np.broadcast_to(line, shape), axis=axis)
    places = np.take(order, range(count), axis).astype(np.int32)
    x, updates = special(shape), special(places.shape, 1)
    built = build_program(lambda x, v: mb.scatter_along_axis(data=x, indices=places, updates=v, axis=axis, mode=mode,
                                                             name="y"), x=tuple(shape), v=places.shape)
    grid = list(np.indices(places.shape))
    grid[axis] = places
    assert fires(built, max_parts=999) and not kinds(built).keys() & KINDS
    held(built, x, updates, applied(x, tuple(grid), updates, mode), mode)


@pytest.mark.law
@given(windows())
def test_any_window_of_a_slice_update(drawn):
    shape, window = drawn
    x = special(shape)
    updates = special(x[window].shape, 1)
    built = build_program(lambda x, v: mb.slice_update(
        x=x, update=v, begin=[each.start for each in window], end=shape, stride=[each.step for each in window],
        name="y"), opset=ct.target.iOS18, x=tuple(shape), v=updates.shape)
    assert not fires(built) and fires(built, windows=True) == ["slice_update"]
    held(built, x, updates, applied(x, window, updates, "update"), "update")


def test_the_rest_may_be_of_symbolic_size():
    built = build_program(lambda x: mb.scatter(data=x, indices=np.array([1, 2], np.int32), axis=1, mode="add",
                                               updates=mb.slice_by_index(x=x, begin=[0, 0, 0], end=[0, 2, 0],
                                                                         begin_mask=[True, False, True],
                                                                         end_mask=[True, False, True]), name="y"),
                          x=(None, 4, None))
    assert fires(built)
    x = special((3, 4, 5))
    held(built, x, None, applied(x, (slice(None), slice(1, 3)), x[:, :2], "add"), "add")


def test_a_constant_of_zeros_is_padded():
    built = build_program(lambda v: mb.scatter_nd(
        data=np.zeros((4, 6), np.float16), indices=np.stack(np.meshgrid([1, 2], [3, 4], indexing="ij"), -1).astype(
            np.int32), updates=v, mode="update", name="y"), v=(2, 2))
    assert fires(built) and kinds(built) - kinds(built).__class__(["const"] * 9) == {"pad": 1}


def test_integers_move_and_are_not_computed_with():
    def made(mode):
        return build_program(lambda x, v: mb.scatter(data=x, indices=np.array([1, 2], np.int32), updates=v, mode=mode,
                                                     name="y"), dtype=types.int32, x=(4,), v=(2,))

    assert fires(made("update")) and not fires(made("add"))


def test_results_that_are_outputs_in_several_functions():
    made = Program()
    for name in ("main", "other"):
        with Function({"x": mb.placeholder(shape=(4, 6), dtype=types.fp16)}, opset_version=ct.target.iOS17) as function:
            x = function.inputs["x"]
            line = mb.scatter(data=mb.reshape(x=x, shape=[24]), indices=np.arange(0, 24, 6, dtype=np.int32),
                              updates=np.arange(4, dtype=np.float16), mode="update", name="z")
            function.set_outputs([mb.reshape(x=line, shape=[4, 6], name="y"), line])
        made.add_function(name, function)
    assert len(fires(made)) == 2
    found = Runtime(made, precision="float16")({"x": np.ones((4, 6), np.float16)})
    right = applied(np.ones((4, 6), np.float16), (slice(None), 0), np.arange(4), "update")
    np.testing.assert_array_equal(found["y"], right)
    np.testing.assert_array_equal(found["z"], right.reshape(-1))


def test_it_is_wanted_on_every_target():
    built = build_program(lambda x, v: mb.scatter(data=x, indices=np.array([1], np.int32), updates=v, mode="update"),
                          x=(4,), v=(1,))
    rule = find_rewrite("scatter_as_slices").configured()
    assert all(find_matches(rule, built, target=target).fired for target in ("a12", "m1", "m4", "m6", "all"))
    assert [fix.name for fix in fixes_for(get_all_rules()["scatter"])] == ["scatter_as_slices"]
