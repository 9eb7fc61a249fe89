"""ANE216: constant boxes of crop_resize as slices that are resized, against the op, coremltools' values and PyTorch."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import assume, given
from hypothesis import strategies as st

from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from tests.conversions import reload_program
from tests.rewrites.helpers import configure_rewrite, kinds, only_output, unsupported_ops

MODES = ["STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS"]
BOXES = ["CORNERS_HEIGHT_FIRST", "CORNERS_WIDTH_FIRST", "CENTER_SIZE_HEIGHT_FIRST", "CENTER_SIZE_WIDTH_FIRST"]
INSIDE = "a box whose points are all outside of the image"


rule = partial(configure_rewrite, "crop_resize_by_slices")


def crops(boxes, size, shape=(1, 2, 6, 7), indices=None, opset=ct.target.iOS17, **how):
    boxes = np.array(boxes, np.float32)
    if opset >= ct.target.iOS17:
        how |= {"boxes": boxes, "box_indices": np.array([0] * len(boxes) if indices is None else indices, np.int32)}
    else:
        how["roi"] = boxes.astype(np.float16).reshape(len(boxes), 1, -1, 1, 1)
    return build_program(lambda x: mb.crop_resize(x=x, target_height=size[0], target_width=size[1], name="y", **how),
                         x=shape, opset=opset)


def drawn(shape, special=()):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    for number, each in enumerate(special):
        x.flat[number::7 + number] = each
    return x


@st.composite
def draws(draw):
    shape = tuple(draw(st.integers(1, most)) for most in (3, 2, 9, 9))
    places = st.one_of(st.integers(-1, 9).map(float), st.floats(-1, 9, width=16).map(lambda v: round(v * 16) / 16))
    boxes = draw(st.lists(st.lists(places, min_size=4, max_size=4), min_size=1, max_size=3))
    opset = draw(st.sampled_from([ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18]))
    how = {"sampling_mode": draw(st.sampled_from(MODES)), "box_coordinate_mode": draw(st.sampled_from(BOXES)),
           "spatial_scale": draw(st.sampled_from([1.0, 0.5])), "opset": opset,
           "indices": [draw(st.integers(0, shape[0] - 1)) for _ in boxes]}
    if draw(st.booleans()) and opset < ct.target.iOS17:
        shape, boxes = (1, *shape[1:]), [[0, *box] for box in boxes]
    return boxes, (draw(st.integers(1, 8)), draw(st.integers(1, 8))), shape, how


@pytest.mark.law
@given(draws(), st.booleans())
def test_any_boxes_are_the_ops(given_draw, normalized):
    boxes, size, shape, how = given_draw
    if normalized:
        how["spatial_scale"] /= 8
    built = crops(boxes, size, shape, normalized_coordinates=normalized, **how)
    old = clone_program(built)
    trace = apply_rewrite(rule(max_parts=200), built)
    if not trace.fired:
        assert [miss.reason for miss in trace.near_misses] == [INSIDE]
        return
    assert not kinds(built)["crop_resize"] and not unsupported_ops(built, "m4") and not unsupported_ops(built, "m1")
    x = drawn(shape)
    truth, found = only_output(old, x, "float64"), only_output(built, x, "float64")
    assert found.shape == truth.shape
    np.testing.assert_allclose(found, truth, rtol=0, atol=2.0**-10 * np.abs(x).max())
    x = drawn(shape, (-0.0, 6e-8))
    np.testing.assert_allclose(only_output(built, x, "float16"), only_output(old, x, "float16"), rtol=0, atol=4e-3)
    x = drawn(shape, (np.inf, np.nan, -np.inf))
    before, after = only_output(old, x, "float16"), only_output(built, x, "float16")
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(after), kind(before))


@pytest.mark.law
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(2, 7), st.integers(2, 7))
def test_corners_on_elements_are_torchs_interpolation(corners, height, width):
    top, left, bottom, right = corners
    assume(top <= bottom and left <= right)
    built = crops([corners], (height, width), sampling_mode="ALIGN_CORNERS")
    assert apply_rewrite(rule(), built).fired
    x = drawn((1, 2, 6, 7))
    part = torch.from_numpy(x[:, :, top:bottom + 1, left:right + 1]).double()
    truth = torch.nn.functional.interpolate(part, (height, width), mode="bilinear", align_corners=True)
    np.testing.assert_allclose(only_output(built, x, "float64"), truth.numpy(), rtol=0, atol=1e-12)


@pytest.mark.law
@given(st.lists(st.integers(0, 24).map(lambda number: number / 5), min_size=4, max_size=4))
def test_corners_between_elements_are_torchs_grid(corners):
    top, left, bottom, right = corners
    built = crops([corners], (4, 3), sampling_mode="ALIGN_CORNERS")
    assert apply_rewrite(rule(), built).fired
    x = drawn((1, 2, 6, 7))
    rows = torch.linspace(top, bottom, 4, dtype=torch.float64) * 2 / 5 - 1
    columns = torch.linspace(left, right, 3, dtype=torch.float64) * 2 / 6 - 1
    grid = torch.stack([columns.expand(4, 3), rows[:, None].expand(4, 3)], -1)[None]
    truth = torch.nn.functional.grid_sample(torch.from_numpy(x).double(), grid, align_corners=True).numpy()
    np.testing.assert_allclose(only_output(built, x, "float64"), truth, rtol=0, atol=2.0**-10 * np.abs(x).max())


@pytest.mark.parametrize(("box", "size", "expected"), [
    ([1, 1, 2, 2], (2, 2), [6, 7, 10, 11]),
    ([1, 1, 2, 2], (1, 1), [8.5]),
    ([2, 2, 1, 1], (2, 2), [11, 10, 7, 6]),
    ([1, 1, 2, 2], (4, 4), (6 + np.arange(4)[:, None] * 4 / 3 + np.arange(4) / 3).ravel()),
])
def test_the_values_of_coremltools_own_tests(box, size, expected):
    built = crops([box], size, (1, 1, 4, 4), opset=ct.target.iOS15, sampling_mode="ALIGN_CORNERS")
    assert apply_rewrite(rule(), built).fired
    x = np.arange(1, 17, dtype=np.float16).reshape(1, 1, 4, 4)
    np.testing.assert_allclose(only_output(built, x, "float64").ravel(), expected, atol=1e-12)


def test_patches_are_slices_to_the_bit_and_equal_ones_are_cut_once():
    built = crops([[0, 0, 3, 3], [2, 3, 5, 6], [0, 0, 3, 3]], (4, 4), sampling_mode="ALIGN_CORNERS")
    apply_rewrite(rule(), built)
    assert {kind: count for kind, count in kinds(built).items() if kind != "const"} == {
        "slice_by_index": 2, "concat": 1}
    x = drawn((1, 2, 6, 7), (np.inf, np.nan, -0.0))
    truth = np.concatenate([x[:, :, :4, :4], x[:, :, 2:, 3:], x[:, :, :4, :4]])
    found = only_output(built, x, "float16")
    np.testing.assert_array_equal(found, truth)
    assert np.array_equal(np.signbit(found), np.signbit(truth))


def test_all_of_an_only_image():
    built = crops([[0, 0, 5, 6]], (6, 7))
    apply_rewrite(rule(), built)
    x = drawn((1, 2, 6, 7))
    assert not kinds(built)["crop_resize"]
    np.testing.assert_array_equal(only_output(built, x, "float16"), x)


def test_a_point_that_fp16_does_not_tell_from_an_element_is_the_element():
    built = crops([[np.float32(1 / 3), 0, 1, 1]], (2, 2), (1, 1, 4, 4), normalized_coordinates=True,
                  sampling_mode="ALIGN_CORNERS")
    assert apply_rewrite(rule(), built).fired
    x = drawn((1, 1, 4, 4))
    assert {kind: count for kind, count in kinds(built).items() if kind != "const"} == {"slice_by_index": 1}
    np.testing.assert_array_equal(only_output(built, x, "float16"), x[:, :, 1::2, ::3])


def test_batch_and_channels_stay_symbolic():
    built = crops([[0, 0, 2, 2], [1, 1.5, 3, 4]], (3, 3), (None, None, 6, 7), opset=ct.target.iOS16)
    old = clone_program(built)
    assert apply_rewrite(rule(), built).fired
    x = drawn((2, 3, 6, 7))
    np.testing.assert_allclose(only_output(built, x, "float16"), only_output(old, x, "float16"), atol=4e-3)


def test_the_option_bounds_the_slices():
    built = crops([[0, 0, at, 4] for at in range(1, 6)], (3, 3), sampling_mode="ALIGN_CORNERS")
    (miss,) = find_matches(rule(max_parts=4), built).near_misses
    assert miss.reason == "5 slices for 5 boxes, max_parts=4"
    assert apply_rewrite(rule(max_parts=5), built).fired


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(opset, tmp_path):
    built = crops([[1, 0.5, 4, 5.25]], (4, 4), opset=opset)
    old = clone_program(built)
    for target in ("m1", "m4"):
        assert unsupported_ops(built, target) == ["crop_resize"] and find_matches(rule(), built, target=target).fired
    loaded = reload_program(built, tmp_path / "m.mlpackage", opset, passes="crop_resize_by_slices")
    assert not kinds(loaded)["crop_resize"] and not unsupported_ops(loaded, "m4")
    x = drawn((1, 2, 6, 7))
    np.testing.assert_allclose(only_output(loaded, x, "float16"), only_output(old, x, "float16"), atol=4e-3)
