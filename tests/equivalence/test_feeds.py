"""What is fed when nobody gives feeds: right names, shapes and dtypes, values in the domain of each input."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types
from coremltools.converters.mil.mil.program import get_new_symbol
from coremltools.proto import FeatureTypes_pb2, Model_pb2

import mil_ane_passes as ane
from mil_ane_passes.equivalence.equivalence import build_plans
from mil_ane_passes.equivalence.feeds import ShapeChoice, list_shape_choices, make_feeds
from mil_ane_passes.passes.examples import build_program
from tests.ir.test_edits import stateful


def function(body=None, opset=ct.target.iOS18, **inputs) -> Function:
    """`inputs` are (dtype, shape); the outputs are what `body` makes of them, else an identity of each."""
    placeholders = {name: mb.placeholder(shape=shape, dtype=dtype) for name, (dtype, shape) in inputs.items()}
    with Function(placeholders, opset_version=opset) as made:
        given = made.inputs
        made.set_outputs([body(**given)] if body else [mb.identity(x=var) for var in given.values()])
    return made


def described(**features):
    """A model description whose input types are filled in by the functions in `features`."""
    description = Model_pb2.ModelDescription()
    for name, fill in features.items():
        feature = description.input.add()
        feature.name = name
        fill(feature.type)
    return description


def array(shape=(), enumerated=(), ranges=()):
    def fill(kind):
        kind.multiArrayType.dataType = FeatureTypes_pb2.ArrayFeatureType.FLOAT32
        kind.multiArrayType.shape.extend(shape)
        for each in enumerated:
            kind.multiArrayType.enumeratedShapes.shapes.add().shape.extend(each)
        for low, high in ranges:
            size = kind.multiArrayType.shapeRange.sizeRanges.add()
            size.lowerBound, size.upperBound = low, high

    return fill


def image(width, height, enumerated=(), ranges=()):
    def fill(kind):
        kind.imageType.width, kind.imageType.height = width, height
        kind.imageType.colorSpace = FeatureTypes_pb2.ImageFeatureType.RGB
        for each in enumerated:
            size = kind.imageType.enumeratedSizes.sizes.add()
            size.width, size.height = each
        if ranges:
            for name, (low, high) in zip(("widthRange", "heightRange"), ranges):
                bounds = getattr(kind.imageType.imageSizeRange, name)
                bounds.lowerBound, bounds.upperBound = low, high

    return fill


def shapes(made, description=None):
    return {choice.label: choice.shapes for choice in list_shape_choices(made, description)}


def default(made, seed=0, description=None):
    return make_feeds(made, list_shape_choices(made, description)[0], seed, description)


N, M = get_new_symbol(), get_new_symbol()


@pytest.mark.parametrize(
    "dtype", [types.fp16, types.fp32, types.int32, types.int8, types.uint8, types.int16, types.uint16, types.bool]
)
def test_names_shapes_and_dtypes_are_the_inputs(dtype):
    feeds = default(function(a=(dtype, (2, 3)), b=(types.fp16, (1,))))
    assert list(feeds) == ["a", "b"]
    assert feeds["a"].shape == (2, 3) and feeds["a"].dtype == types.nptype_from_builtin(dtype)
    assert feeds["b"].shape == (1,) and feeds["b"].dtype == np.float16


def test_floats_are_normal_draws():
    feed = default(function(x=(types.fp32, (4000,))))["x"]
    assert abs(feed.mean()) < 0.1 and abs(feed.std() - 1) < 0.1 and feed.min() < 0 < feed.max()


def test_bools_are_both():
    assert set(default(function(x=(types.bool, (64,))))["x"].tolist()) == {True, False}


def test_a_seed_says_what_is_drawn():
    made = function(x=(types.fp32, (8,)), i=(types.int32, (64,)))
    for name in ("x", "i"):
        np.testing.assert_array_equal(default(made, 1)[name], default(made, 1)[name])
        assert np.any(default(made, 1)[name] != default(made, 2)[name])


def table(extent=5):
    return mb.const(val=np.ones((extent, 3), np.float32))


INDEXING = {
    "gather": lambda i: mb.gather(x=table(), indices=i, axis=0),
    "other axis": lambda i: mb.gather(x=mb.transpose(x=table(), perm=[1, 0]), indices=i, axis=-1),
    "along axis": lambda i: mb.gather_along_axis(
        x=mb.const(val=np.ones((5, 64), np.float32)), indices=mb.expand_dims(x=i, axes=[0]), axis=0
    ),
    "gather_nd": lambda i: mb.gather_nd(
        x=mb.const(val=np.ones((5, 9), np.float32)), indices=mb.expand_dims(x=i, axes=[-1])
    ),
    "one_hot": lambda i: mb.one_hot(indices=i, one_hot_vector_size=5),
    "through ops": lambda i: mb.gather(
        x=table(), indices=mb.cast(x=mb.reshape(x=i, shape=[8, 8]), dtype="int16"), axis=0
    ),
    "two tables": lambda i: mb.concat(
        values=[mb.gather(x=table(9), indices=i, axis=0), mb.gather(x=table(5), indices=i, axis=0)], axis=0
    ),
}


@pytest.mark.parametrize("body", INDEXING.values(), ids=INDEXING)
def test_ids_are_in_range_and_reach_all_of_it(body):
    feed = default(function(body, i=(types.int32, (64,))))["i"]
    assert set(feed.tolist()) == set(range(5))


def test_images_are_pixels():
    made = function(picture=(types.fp32, (1, 3, 32, 32)))
    feed = default(made, description=described(picture=image(32, 32)))["picture"]
    assert feed.dtype == np.float32 and np.array_equal(feed, np.round(feed))
    assert 0 <= feed.min() < 10 and 245 < feed.max() <= 255


def test_fixed_shapes_are_one_choice():
    assert shapes(function(x=(types.fp16, (2, 3)))) == {"default": {"x": (2, 3)}}
    assert shapes(function(x=(types.fp16, (2, 3))), described(x=array((2, 3)))) == {"default": {"x": (2, 3)}}


def test_every_enumerated_shape_is_tried():
    made = function(x=(types.fp32, (N, 4, M)))
    description = described(x=array((2, 4, 8), enumerated=[(2, 4, 8), (1, 4, 6), (3, 4, 9)]))
    tried = [choice.shapes["x"] for choice in list_shape_choices(made, description)]
    assert tried == [(2, 4, 8), (1, 4, 6), (3, 4, 9)]


@pytest.mark.parametrize("shape", [(2, 4, -8), (2, 4)])
def test_shapes_that_no_array_has_are_refused(shape):
    description = described(x=array((2, 4, 8), enumerated=[(2, 4, 8), shape]))
    with pytest.raises(ane.InputError, match=r"^input 'x': its description allows the shape \(2, 4.*\) \(enum.* 1\); "
                                             r"expected 3 sizes of 0 or more; the package is damaged"):
        list_shape_choices(function(x=(types.fp32, (N, 4, M))), description)


def test_a_default_without_elements_is_tried_beside_a_range():
    description = described(x=array((2, 4, 0), ranges=[(2, 2), (4, 4), (1, -1)]))
    tried = list_shape_choices(function(x=(types.fp32, (N, 4, M))), description)
    assert [choice.shapes["x"] for choice in tried][:2] == [(2, 4, 0), (2, 4, 1)]


def test_both_ends_of_a_range_and_the_default_are_tried():
    made = function(x=(types.fp32, (1, 4, N)))
    found = shapes(made, described(x=array((1, 4, 10), ranges=[(1, 1), (4, 4), (8, 64)])))
    assert found == {"default": {"x": (1, 4, 10)}, "smallest": {"x": (1, 4, 8)}, "largest": {"x": (1, 4, 64)}}


@pytest.mark.parametrize("upper", [-1, 1 << 40])
def test_an_end_that_is_open_or_too_large_is_tried_as_far_as_is_reasonable(upper):
    found = shapes(function(x=(types.fp32, (1, N))), described(x=array((1, 10), ranges=[(1, 1), (0, upper)])))
    large = found.pop("large (not the largest)")["x"]
    assert large[0] == 1 and 10_000 <= large[1] <= 1 << 18
    assert found == {"default": {"x": (1, 10)}, "smallest": {"x": (1, 1)}}


def test_only_what_is_flexible_gives_way_to_a_shape_of_reasonable_size():
    found = shapes(function(x=(types.fp32, (1, 512, N))), described(
        x=array((1, 512, 10), ranges=[(1, 1), (512, 512), (1, 100_000)])))
    one, channels, length = found["large (not the largest)"]["x"]
    assert (one, channels) == (1, 512) and 100 <= length <= 512


def test_nothing_said_about_a_symbol_gives_it_two_sizes():
    found = shapes(function(x=(types.fp32, (N, 4))))
    assert list(found) == ["default", "longer"]
    assert 1 < found["default"]["x"][0] < found["longer"]["x"][0] and found["longer"]["x"][1] == 4


def test_a_lone_flag_takes_turns():
    made = function(x=(types.bool, (1,)))
    flags = [make_feeds(made, ShapeChoice("default", {"x": (1,)}), seed)["x"].item() for seed in range(4)]
    assert flags == [True, False, True, False]


def test_inputs_that_share_a_symbol_share_its_size():
    made = function(x=(types.fp32, (N, 4)), y=(types.fp32, (2, N)), z=(types.fp32, (M,)))
    description = described(x=array((6, 4), enumerated=[(6, 4), (3, 4)]), y=array((2, 5)), z=array((7,)))
    assert shapes(made, description) == {
        "default": {"x": (6, 4), "y": (2, 6), "z": (7,)},
        "enumerated 1": {"x": (3, 4), "y": (2, 3), "z": (7,)},
    }


@pytest.mark.parametrize("flexible", [{"enumerated": [(40, 24), (20, 12)]}, {"ranges": [(20, 40), (12, 24)]}])
def test_flexible_images_are_tried_in_sizes_they_have(flexible):
    made = function(picture=(types.fp32, (1, 3, N, M)))
    description = described(picture=image(40, 24, **flexible))
    tried = {choice.shapes["picture"] for choice in list_shape_choices(made, description)}
    assert tried == {(1, 3, 24, 40), (1, 3, 12, 20)}


def test_states_are_not_fed():
    assert list(default(stateful().functions["main"])) == ["x"]


def test_a_choice_of_its_own_is_followed():
    made = function(x=(types.fp32, (N, 4)))
    assert make_feeds(made, ShapeChoice("mine", {"x": (3, 4)}), 0)["x"].shape == (3, 4)


def test_every_shape_gets_a_run_and_every_function_its_draws():
    prog = Program()
    prog.add_function("main", function(x=(types.fp32, (1, N))))
    prog.add_function("other", function(x=(types.fp32, (2, 2))))
    description = described(x=array((1, 2), enumerated=[(1, size) for size in range(2, 7)]))
    runs = build_plans(prog, 3, lambda name: description if name == "main" else None)
    assert [run.feeds["x"].shape for run in runs if run.function == "main"] == [(1, size) for size in range(2, 7)]
    assert [run.label for run in runs if run.function == "other"] == ["seed 0", "seed 1", "seed 2"]
    assert runs[1].label == "seed 1, enumerated 1 shapes"


def test_every_third_draw_of_a_mask_hides_a_whole_row():
    def body(x, m):
        hidden = mb.mul(x=mb.sub(x=np.float16(1), y=m), y=np.float16(-6e4))
        return mb.softmax(x=mb.add(x=x, y=hidden), axis=-1)

    function = build_program(body, x=(3, 8), m=(3, 8)).functions["main"]
    (choice,) = list_shape_choices(function)
    masks = [make_feeds(function, choice, seed)["m"] for seed in range(3)]
    assert [set(mask.ravel().tolist()) for mask in masks] == [{0.0, 1.0}] * 3
    assert (masks[2] == 0).all(axis=-1).any()


@pytest.mark.parametrize("width", [1, 2])
def test_masks_that_hide_no_row_have_a_one_in_each(width):
    """In rows of several elements: a single one is a flag, which has both values."""
    made = function(m=(types.bool, (40, width)))
    (choice,) = list_shape_choices(made)
    masks = [make_feeds(made, choice, seed, hides_rows=False)["m"] for seed in range(3)]
    assert all(mask.any(axis=-1).all() == (width > 1) and not mask.all() for mask in masks)
    assert not all(make_feeds(made, choice, seed)["m"].any(axis=-1).all() for seed in range(3))
