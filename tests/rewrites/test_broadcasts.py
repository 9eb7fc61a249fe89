"""ANE234 and ANE106: broadcasts as tiles and tiles as broadcasts, which do not undo each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.printer import format_function_body
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.pipeline import sort_passes
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, kinds
from tests.rewrites.spellings import WAYS, converted, outputs

DROP, TILE = "drop_broadcast_tile", "tile_broadcast"
OPS = ["add", "sub", "mul", "real_div", "maximum", "minimum"]


@st.composite
def two_shapes(draw):
    """Two shapes that broadcast, and are not the same."""
    whole = draw(st.lists(st.integers(2, 4), min_size=1, max_size=5))
    ones = [draw(st.sampled_from([0, 0, 1, 2])) for _ in whole]  # 1: the one is short there, 2: the other
    sides = [[1 if short == side else extent for short, extent in zip(ones, whole)] for side in (1, 2)]
    cut = 0
    while cut < len(whole) - 1 and sides[1][cut] == 1 and draw(st.booleans()):
        cut += 1
    return tuple(sides[0]), tuple(sides[1][cut:])


def numbers(shape, seed):
    """Zeros of the negative sign alone: which of two zeros a maximum takes is not defined."""
    return np.random.default_rng(seed).choice([1.5, -2.0, -0.0, np.inf, np.nan, 6e-8], shape).astype(np.float32)


def same(one, other):
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.signbit(one)[one == 0], np.signbit(other)[one == 0])


@pytest.mark.law
@given(two_shapes(), st.sampled_from(OPS), st.booleans(), st.integers(0, 2**31))
def test_there_and_back(shapes, kind, swapped, seed):
    """Tiles go in where a target before the M4 is named, come out again, and nothing moves by a bit."""
    one, other = shapes[::-1] if swapped else shapes
    held = build_program(lambda x, z: getattr(mb, kind)(x=x, y=z, name="y"), x=one, z=other)
    text = format_function_body(held.functions["main"])
    feeds = {"x": numbers(one, seed), "z": numbers(other, seed + 1)}
    true = Runtime(held, precision="float16")(feeds)["y"]
    fired = apply_rewrite(configure_rewrite(TILE), held, target="m1").fired
    assert bool(fired) == (np.broadcast_shapes(one, other) != one or one != other)
    computing = [op for op in held.functions["main"].operations if op.op_type == kind]
    assert all(tuple(op.x.shape) == tuple(op.y.shape) == tuple(op.outputs[0].shape) for op in computing)
    same(Runtime(held, precision="float16")(feeds)["y"], true)
    apply_rewrite(configure_rewrite(DROP), held, target="m4")
    assert "tile" not in kinds(held) or min(len(one), len(other)) < max(len(one), len(other))
    same(Runtime(held, precision="float16")(feeds)["y"], true)
    if len(one) == len(other) and kinds(held)["tile"] == 0:
        assert format_function_body(held.functions["main"]) == text


@pytest.mark.law
@given(two_shapes(), st.sampled_from([*OPS, "greater", "equal"]), st.integers(0, 2**31))
def test_a_tile_that_goes_leaves_the_same_bits(shapes, kind, seed):
    whole = np.broadcast_shapes(*shapes)
    small = (1,) * (len(whole) - len(shapes[0])) + shapes[0]
    reps = np.array([full if mine == 1 else 1 for mine, full in zip(small, whole)], np.int32)

    def body(x, z):
        made = getattr(mb, kind)(x=mb.tile(x=x, reps=reps), y=z)
        return mb.cast(x=made, dtype="fp16", name="y")

    held = build_program(body, x=small, z=whole)
    feeds = {"x": numbers(small, seed), "z": numbers(whole, seed + 1)}
    true = Runtime(held, precision="float16")(feeds)["y"]
    assert apply_rewrite(configure_rewrite(DROP), held).fired and "tile" not in kinds(held)
    same(Runtime(held, precision="float16")(feeds)["y"], true)
    assert not [row for row in predict_plan(held, [each() for each in get_all_rules().values()], target="m4")[0].rows
                if row.ane == "no"]


@pytest.mark.parametrize("way", WAYS)
def test_as_torch_spells_it(way, tmp_path):
    """A norm of rows that is expanded before the division, as sentence embeddings and Swin v2 do."""
    def function(x):
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-4).expand_as(x)

    before = converted(function, way, tmp_path / "before")
    assert kinds(before)["tile"] == 1
    after = converted(function, way, tmp_path / "after", passes=DROP)
    assert kinds(after)["tile"] == 0
    x = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float16)
    same(outputs(after, x, "float16"), outputs(before, x, "float16"))
    true = function(torch.from_numpy(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(outputs(after, x, "float64"), true, rtol=1e-9)


def test_a_pipeline_with_both_ends_with_tiles():
    assert sort_passes([TILE, DROP]) == [DROP, TILE]


def test_one_tile_for_all_that_read_the_value():
    held = build_program(lambda x, z: [mb.mul(x=x, y=z, name="a"), mb.add(x=z, y=x, name="b")], x=(2, 3), z=(2, 1))
    apply_rewrite(configure_rewrite(TILE), held, target="m2")
    assert kinds(held)["tile"] == 1


@pytest.mark.parametrize(("target", "fires"), [
    ("a12", True), ("m1", True), ("m3", True), ("m4", False), ("m6", False), ("all", False)])
def test_tiles_are_for_old_chips(target, fires):
    held = build_program(lambda x, z: mb.mul(x=x, y=z), x=(2, 3), z=(2, 1))
    found = find_matches(configure_rewrite(TILE), held, target=target)
    assert bool(found.fired) == fires
    assert fires or [miss.reason for miss in found.near_misses] == [
        "supported on M4 and later; choose an older target, or always=true"]
    assert find_matches(configure_rewrite(TILE, always=True), held, target=target).fired
    tiled = build_program(lambda x, z: mb.mul(x=x, y=mb.tile(x=z, reps=[1, 3])), x=(2, 3), z=(2, 1))
    assert bool(find_matches(configure_rewrite(DROP), tiled, target=target).fired) != fires


def test_a_repeated_output_stays():
    def body(x, z):
        wide = mb.tile(x=z, reps=[1, 3], name="wide")
        return [mb.mul(x=x, y=wide, name="y"), wide]

    found = find_matches(configure_rewrite(DROP), build_program(body, x=(2, 3), z=(2, 1)))
    assert [miss.reason for miss in found.near_misses] == ["the repeated value is an output"]


def test_an_open_extent_says_nothing():
    held = build_program(lambda x, z: mb.mul(x=x, y=mb.tile(x=z, reps=[1, 3])), x=(2, None), z=(2, 1))
    assert [miss.reason for miss in find_matches(configure_rewrite(DROP), held).near_misses] == [
        "the other operand's extent is dynamic"
    ]


def test_a_tile_along_a_longer_axis_is_no_broadcast():
    held = build_program(lambda x, z: mb.mul(x=x, y=mb.tile(x=z, reps=[1, 2])), x=(2, 6), z=(2, 3))
    assert not find_matches(configure_rewrite(DROP), held).fired


def test_integers_too():
    held = build_program(lambda x, z: mb.add(x=x, y=mb.tile(x=z, reps=[1, 3]), name="y"), dtype=types.int32, x=(2, 3),
                         z=(2, 1))
    assert apply_rewrite(configure_rewrite(DROP), held).fired and "tile" not in kinds(held)
    feeds = {"x": np.arange(6, dtype=np.int32).reshape(2, 3), "z": np.int32([[10], [20]])}
    np.testing.assert_array_equal(Runtime(held)(feeds)["y"], [[10, 11, 12], [23, 24, 25]])


def test_through_a_saved_package(tmp_path):
    held = converted(lambda x: x - x.mean(-1, keepdim=True).expand_as(x), "traced", tmp_path)
    assert kinds(held)["tile"] == 1
    apply_rewrite(configure_rewrite(DROP), held)
    assert kinds(held)["tile"] == 0
    package = ane.load(tmp_path / "traced.mlpackage")
    apply_rewrite(configure_rewrite(DROP), package.program)
    ane.save(package, tmp_path / "after.mlpackage")
    assert kinds(ane.load(tmp_path / "after.mlpackage").program)["tile"] == 0
