"""ANE220 and ANE220: constant places as PyTorch and NumPy index them, without a gather."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types
from hypothesis import assume, given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Hit
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from mil_ane_passes.passes.registry import find_rewrite, fixes_for, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds
from tests.rewrites.spellings import converted, grid, outputs, truth

KINDS = {"gather", "gather_nd", "gather_along_axis"}
SPELLINGS = {
    "columns in a different order": lambda x: x[:, [0, 2, 1]],
    "index_select": lambda x: torch.index_select(x, 2, torch.tensor([3, 1, 1])),
    "torch.gather": lambda x: torch.gather(x, 1, torch.tensor([[[1], [0], [5]]]).expand(2, 3, 4).contiguous()),
    "points": lambda x: x[:, torch.arange(4), torch.arange(4)],
    "every pair": lambda x: x[:, torch.tensor([[1], [4]]), torch.tensor([[0, 3]])],
    "repeats": lambda x: x[:, torch.tensor([0, 0, 0, 1, 1, 1])],
    "rolled": lambda x: x[:, (torch.arange(8) + 3) % 8],
    "shuffled": lambda x: x[:, torch.arange(8).reshape(2, 4).T.flatten()],
    "flipped": lambda x: x[:, torch.arange(7, -1, -1)],
}


def fires(rule, built, target="all", **options):
    return [
        finding.op
        for finding in apply_rewrite(find_rewrite(rule).configured(**options), built, target=target).fired
    ]


def refused(built, target):
    rules = [get_all_rules()[name]() for name in ("constant_gather", "runtime_gather")]
    _, found = predict_plan(built, rules, target=target)
    return [each.answer.op.op_type for each in found if isinstance(each.answer, Hit)]


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_gather_is_left_of_what_torch_spells(spelling, way, tmp_path):
    function, x = SPELLINGS[spelling], grid()
    built = converted(function, way, tmp_path)
    assert kinds(built).keys() & KINDS
    assert fires("gather_as_slices", built, "m1")
    assert not kinds(built).keys() & KINDS and not refused(built, "m1")
    np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x))


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
def test_it_stands_through_a_conversion_and_the_package(target, tmp_path):
    function, x = SPELLINGS["every pair"], grid()
    built = converted(function, "traced", tmp_path, passes="gather_as_slices{always=true}", target=target)
    assert not kinds(built).keys() & KINDS
    np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x))


def test_newer_targets_keep_a_gather_that_would_have_to_be_joined():
    def built():
        return build_program(lambda x: mb.gather(x=x, indices=np.array([1, 2, 0], np.int32), axis=1), x=(1, 3, 4))

    assert {target: bool(find_matches(find_rewrite("gather_as_slices").configured(), built(), target=target).fired)
            for target in ("m1", "a17", "m4", "m5", "all")} == {"m1": True, "a17": True, "m4": False, "m5": False,
                                                                "all": False}
    assert fires("gather_as_slices", built(), "m4", always=True)


def test_joining_on_the_last_axis_steps_aside_where_that_goes_wrong():
    def made(target):
        built = build_program(lambda x: mb.gather(x=x, indices=np.array([2, 0, 1], np.int32), axis=-1), x=(2, 3))
        fires("gather_as_slices", built, target, always=True)
        return kinds(built)["transpose"]

    assert {target: made(target) for target in ("m1", "m2", "m3", "m4")} == {"m1": 2, "m2": 2, "m3": 0, "m4": 0}


@st.composite
def indexed(draw):
    """A shape, one of its axes, and places of it, drawn at random or by a rule."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    extent = shape[axis] = draw(st.integers(1, 9))
    form = draw(st.sampled_from(["any", "run", "repeated", "tiled", "turned", "scalar", "grid"]))
    places = np.array(draw(st.lists(st.integers(-extent, extent - 1), min_size=1, max_size=8)), np.int32)
    if form == "run":
        places = np.arange(extent)[:: draw(st.sampled_from([-2, -1, 1, 2, 3]))]
    elif form == "repeated":
        places = np.repeat(places, draw(st.integers(2, 3)))
    elif form == "tiled":
        places = np.tile(places, draw(st.integers(2, 3)))
    elif form == "turned":
        rows = draw(st.sampled_from([each for each in range(1, extent + 1) if extent % each == 0]))
        places = np.arange(extent).reshape(rows, -1).T.reshape(-1)
    elif form == "scalar":
        places = places[0]
    elif form == "grid" and len(places) % 2 == 0 and len(shape) < 4:
        places = places.reshape(2, -1)
    return shape, axis, np.asarray(places, np.int32)


@pytest.mark.law
@given(indexed(), st.sampled_from(["m1", "m4"]), st.booleans())
def test_any_places_of_an_axis(drawn, target, first):
    shape, axis, places = drawn
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    x.reshape(-1)[:2] = [np.nan, np.inf][: x.size]
    symbolic = [None if first and number == 0 and len(shape) + axis and axis else extent
                for number, extent in enumerate(shape)]
    built = build_program(lambda x: mb.gather(x=x, indices=places, axis=axis, name="y"), x=tuple(symbolic))
    fires("gather_as_slices", built, target, always=True)
    assert not kinds(built).keys() & KINDS
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], np.take(x, places, axis))
    built.validate()


@st.composite
def points(draw):
    """Numbers, and points of their first axes: combinations of places of each, or any; up to 5 axes come out."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    depth = draw(st.integers(1, len(shape)))
    lists = [draw(st.lists(st.integers(-extent, extent - 1), min_size=1, max_size=3)) for extent in shape[:depth]]
    columns = np.stack(np.meshgrid(*lists, indexing="ij"), -1)
    if draw(st.booleans()):
        columns = columns.reshape(-1, depth)
        columns = columns[draw(st.permutations(range(len(columns))))[:6]]
    assume(columns.ndim + len(shape) - depth - 1 <= 5)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16), columns.astype(np.int32)


@pytest.mark.law
@given(points())
def test_any_points(drawn):
    x, places = drawn
    built = build_program(lambda x: mb.gather_nd(x=x, indices=places, name="y"), x=x.shape)
    fires("gather_as_slices", built, "m1", max_parts=999)
    assert not kinds(built).keys() & KINDS
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"],
                                  x[tuple(np.moveaxis(places, -1, 0))])


@pytest.mark.law
@given(st.data(), st.integers(0, 2))
def test_any_places_along_an_axis(data, axis):
    shape = [data.draw(st.integers(1, 4)) for _ in range(3)]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    wanted = [*shape]
    wanted[axis] = data.draw(st.integers(1, 4))
    flat = data.draw(st.lists(st.integers(-shape[axis], shape[axis] - 1), min_size=int(np.prod(wanted)),
                              max_size=int(np.prod(wanted))))
    places = np.array(flat, np.int32).reshape(wanted)
    if data.draw(st.booleans()):
        places = np.broadcast_to(np.take(places, [0], (axis + 1) % 3), wanted)
    built = build_program(lambda x: mb.gather_along_axis(x=x, indices=places, axis=axis, name="y"), x=tuple(shape))
    assert fires("gather_as_slices", built, "m1", max_parts=999)
    right = np.take_along_axis(x, places, axis)
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], right)


@pytest.mark.parametrize(("places", "axis"), [(-1, 1), (0, 1), ([1, 2, 0], 0), ([2, 1], 0), ([1], 1)])
def test_all_other_axes_may_be_of_symbolic_size(places, axis):
    built = build_program(lambda x: mb.gather(x=x, indices=np.array(places, np.int32), axis=axis, name="y"),
                          opset=ct.target.iOS15, x=(3, None, None))
    assert fires("gather_as_slices", built, "m1") and not kinds(built)["gather"]
    x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float16)
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], np.take(x, places, axis))


@pytest.mark.parametrize("dtype", [types.int32, types.uint16, types.int8])
def test_integers_are_moved_like_numbers(dtype):
    built = build_program(
        lambda x: mb.gather(x=x, indices=np.array([3, 0, 1], np.int32), axis=0, name="y"), dtype=dtype, x=(4,)
    )
    assert fires("gather_as_slices", built, "m3")
    x = np.array([3, 1, 4, 1], types.nptype_from_builtin(dtype))
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], [1, 3, 1])


def test_two_functions_and_an_input_read_twice():
    made = Program()
    for name in ("main", "other"):
        with Function({"x": mb.placeholder(shape=(4, 3), dtype=types.fp16)}, opset_version=ct.target.iOS18) as function:
            x = function.inputs["x"]
            rows = mb.gather(x=x, indices=np.array([1], np.int32), axis=0)
            function.set_outputs([mb.add(x=x, y=rows, name="y"), mb.gather(x=x, indices=-1, axis=1, name="z")])
        made.add_function(name, function)
    assert len(fires("gather_as_slices", made, "m4")) == 4 and not kinds(made)["gather"]
    x = np.arange(12, dtype=np.float16).reshape(4, 3)
    found = Runtime(made, precision="float16")({"x": x})
    np.testing.assert_array_equal(found["y"], x + x[1:2])
    np.testing.assert_array_equal(found["z"], x[:, -1])


def test_a_mask_of_positions_is_a_constant_that_the_host_leaves_standing(tmp_path):
    def function(x):
        positions = torch.arange(8).unsqueeze(0)
        rows = positions[torch.zeros(1, 1, dtype=torch.long), torch.arange(8).reshape(1, 8)]
        return x + rows.unsqueeze(-1).to(x.dtype)

    built, x = converted(function, "exported", tmp_path), grid()
    assert kinds(built)["gather_nd"]
    apply_rewrites(select_rewrites(passes="fold_constants,fold_constant_gather"), built)
    assert kinds(built).keys() <= {"add", "cast", "const"}
    np.testing.assert_array_equal(outputs(built, x, "float64"), truth(function, x))


@pytest.mark.law
@given(points())
def test_points_of_a_constant(drawn):
    table, places = drawn
    built = build_program(lambda x: mb.mul(x=x, y=mb.gather_nd(x=table, indices=places), name="y"), x=(1,))
    assert fires("fold_constant_gather", built) == ["gather_nd"]
    found = Runtime(built, precision="float16")({"x": np.ones(1, np.float16)})["y"]
    np.testing.assert_array_equal(np.squeeze(found), np.squeeze(table[tuple(np.moveaxis(places, -1, 0))]))


def test_rows_of_one_table_are_one_constant_for_all_who_ask():
    table = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16)

    def body(x):
        held = mb.const(val=table)
        rows = [mb.gather(x=held, indices=np.array(places, np.int32), axis=0) for places in ([1, 2], [1, 2], [2, 1])]
        return [mb.add(x=x, y=row) for row in rows]

    built = build_program(body, x=(2, 4))
    assert len(fires("fold_constant_gather", built)) == 3
    consts = [op for _, op in iterate_ops(built) if op.op_type == "const" and op.outputs[0].dtype == types.fp16]
    assert len(consts) == 2


def test_the_rule_that_reports_them_names_both():
    built = build_program(lambda x: mb.gather(x=x, indices=np.array([1, 0], np.int32), axis=0, name="y"), x=(2, 3))
    assert refused(built, "m1") == ["gather"] and not refused(built, "m4")
    assert [fix.name for fix in fixes_for(get_all_rules()["constant_gather"])] == [
        "fold_constant_gather",
        "gather_as_slices",
    ]
