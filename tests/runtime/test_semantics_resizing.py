"""Resizing and cropping: the documented formulas, torch and numpy as the truth."""

from __future__ import annotations

import warnings
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.runtime.helpers import Array, close, draw, program, run
from tests.runtime.laws import law

MODES = ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS")
SIZES = st.integers(1, 9)
X = draw(0, 2, 3, 5, 7)


def points(extent: int, count: int, mode: str) -> Array:
    """The grid as the documentation of `resize_bilinear` writes it."""
    i = np.arange(count)
    if mode == "ALIGN_CORNERS" and count == 1:
        return np.array([(extent - 1) / 2])
    if mode in ("ALIGN_CORNERS", "STRICT_ALIGN_CORNERS"):
        grid = i * ((extent - 1) / max(count - 1, 1))
    elif mode == "DEFAULT":
        grid = i * (extent / count)
    elif mode == "OFFSET_CORNERS":
        delta = max(1, extent - 1) / count
        grid = 0.5 * delta + i * delta
    else:
        grid = i * (extent / count) + 0.5 * (extent / count) - 0.5
    return np.minimum(extent - 1, np.maximum(0, grid))


@pytest.mark.parametrize("mode", MODES)
@law
@given(extent=SIZES, count=SIZES)
def test_the_documented_grid(mode: str, extent: int, count: int) -> None:
    x = draw(extent, 1, 1, extent)
    expected = np.interp(points(extent, count, mode), np.arange(extent), x.ravel()).reshape(1, 1, count)

    def build(x: Any) -> Any:
        old = mb.resize_bilinear(x=x, target_size_height=1, target_size_width=count, sampling_mode=mode)
        return old, mb.resize(x=x, shape=[count], resized_dims=np.uint32(1), sampling_mode=mode)

    for found in run(build, {"x": x}):
        close(found, expected)


@law
@given(height=SIZES, width=SIZES)
def test_nearest_neighbours_have_centres(height: int, width: int) -> None:
    expected = functional.interpolate(torch.from_numpy(X), (height, width), mode="nearest-exact")

    def build(x: Any) -> Any:
        old = mb.resize_nearest_neighbor(x=x, target_size_height=height, target_size_width=width)
        shape, mode = np.array([height, width], np.int32), "NEAREST_NEIGHBOR"
        return old, mb.resize(x=x, shape=shape, resized_dims=np.uint32(2), interpolation_mode=mode)

    for found in run(build, {"x": X}):
        close(found, expected)


@pytest.mark.parametrize("mode", ["STRICT_ALIGN_CORNERS", "OFFSET_CORNERS"])
@law
@given(count=SIZES)
def test_nearest_neighbours_of_other_grids(mode: str, count: int) -> None:
    x = np.arange(7, dtype=np.float32)

    def build(x: Any) -> Any:
        nearest = "NEAREST_NEIGHBOR"
        return mb.resize(
            x=x, shape=[count], resized_dims=np.uint32(1), sampling_mode=mode, interpolation_mode=nearest
        )

    found, expected = run(build, {"x": x})[0], points(7, count, mode)
    assert (np.abs(found - expected) <= 0.5 + 1e-9).all()


@law
@given(height=st.sampled_from([1, 2, 3]), width=st.sampled_from([1, 2, 4]))
def test_upsampling_by_whole_factors(height: int, width: int) -> None:
    expected = functional.interpolate(torch.from_numpy(X), scale_factor=(height, width), mode="nearest")

    def build(x: Any) -> Any:
        return mb.upsample_nearest_neighbor(x=x, scale_factor_height=height, scale_factor_width=width)

    close(run(build, {"x": X})[0], expected)


@law
@given(factor=st.integers(1, 40).map(lambda tenths: np.float32(tenths / 10)), extent=st.integers(10, 30))
def test_upsampling_to_the_declared_size(factor: np.float32, extent: int) -> None:
    """0.7 is not a float32: its product with 10 is 7 only when it is rounded."""
    x = draw(1, 1, 1, extent, extent)
    options = {"scale_factor_height": factor, "scale_factor_width": factor}

    def build(x: Any) -> Any:
        return mb.upsample_nearest_neighbor(x=x, **options), mb.upsample_bilinear(x=x, **options)

    declared = program(build, {"x": x}).functions["main"].outputs
    for found, var in zip(run(build, {"x": x}), declared):
        assert found.shape == tuple(int(size) for size in var.shape)


def test_a_symbolic_and_an_inherited_extent() -> None:
    shape = np.array([0, 14], np.int32)

    def build(x: Any, shape: Any) -> Any:
        return mb.resize(x=x, shape=shape, resized_dims=np.uint32(2), sampling_mode="UNALIGN_CORNERS")

    found = run(build, {"x": X, "shape": shape}, shapes={"x": (2, 3, get_new_symbol(), 7)})[0]
    close(found, functional.interpolate(torch.from_numpy(X), (5, 14), mode="bilinear", align_corners=False))


def crop(box: Any, opset: Any = ct.target.iOS17, **options: Any) -> Array:
    """One crop of image 1, in the form that `opset` has for it; (1, channels, rows, columns)."""

    def build(x: Any) -> Any:
        if opset >= ct.target.iOS17:
            boxes, indices = np.array([box], np.float32), np.array([1], np.int32)
            return mb.crop_resize(x=x, boxes=boxes, box_indices=indices, **options)
        return mb.crop_resize(x=x, roi=np.array([1, *box], np.float32).reshape(1, 1, 5, 1, 1), **options)

    found = run(build, {"x": X}, opset=opset)[0]
    return found if opset >= ct.target.iOS17 else found[:, 0]


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17])
@pytest.mark.parametrize("mode", MODES)
@law
@given(height=SIZES, width=SIZES)
def test_a_crop_of_everything_is_a_resize(opset: Any, mode: str, height: int, width: int) -> None:
    size = {"target_height": height, "target_width": width, "sampling_mode": mode}
    found = crop([0, 0, 4, 6], opset, **size)

    def resized(x: Any) -> Any:
        return mb.resize_bilinear(x=x, target_size_height=height, target_size_width=width, sampling_mode=mode)

    close(found, run(resized, {"x": X}, opset=opset)[0][1:])


@pytest.mark.parametrize("opset", [ct.target.iOS16, ct.target.iOS17])
def test_all_ways_to_write_a_box(opset: Any) -> None:
    size = {"target_height": 3, "target_width": 4, "sampling_mode": "OFFSET_CORNERS"}
    expected = crop([1, 2, 3, 6], opset, **size)
    ways: list[tuple[list[float], dict[str, Any]]] = [
        ([2, 1, 6, 3], {"box_coordinate_mode": "CORNERS_WIDTH_FIRST"}),
        ([2, 4, 2, 4], {"box_coordinate_mode": "CENTER_SIZE_HEIGHT_FIRST"}),
        ([4, 2, 4, 2], {"box_coordinate_mode": "CENTER_SIZE_WIDTH_FIRST"}),
        ([1 / 4, 2 / 6, 3 / 4, 6 / 6], {"normalized_coordinates": True}),
        ([2, 4, 6, 12], {"spatial_scale": 0.5}),
    ]
    for box, options in ways:
        close(crop(box, opset, **size, **options), expected)


@law
@given(top=st.floats(0, 2), left=st.floats(0, 4), height=st.floats(1, 2), width=st.floats(1, 2), count=SIZES)
def test_offset_corners_sample_centres(top: float, left: float, height: float, width: float, count: int) -> None:
    box = [np.float32(each) for each in (top, left, top + height, left + width)]
    options = {"target_height": count, "target_width": 2, "sampling_mode": "OFFSET_CORNERS"}
    found = crop(box, **options)
    # one sample in the centre of each bin
    rows = box[0] + (np.arange(count) + 0.5) * (box[2] - box[0]) / count
    columns = box[1] + (np.arange(2) + 0.5) * (box[3] - box[1]) / 2
    along = np.apply_along_axis(lambda line: np.interp(columns, np.arange(7), line), -1, X[1])
    close(found[0], np.apply_along_axis(lambda line: np.interp(rows, np.arange(5), line), -2, along))


def test_a_box_the_other_way_round_is_mirrored() -> None:
    options = {"target_height": 3, "target_width": 4, "sampling_mode": "STRICT_ALIGN_CORNERS"}
    there = crop([1, 2, 3, 6], **options)
    back = crop([3, 6, 1, 2], **options)
    close(back, there[..., ::-1, ::-1])


def test_points_outside_the_image_are_padded() -> None:
    options = {"target_height": 3, "target_width": 1, "sampling_mode": "STRICT_ALIGN_CORNERS"}
    padded = crop([-2, 3, 6, 3], pad_value=9.0, **options)
    close(padded[0, :, :, 0], np.stack([np.full(3, 9.0), X[1, :, 2, 3], np.full(3, 9.0)], -1))
    plain = crop([-2, 3, 6, 3], ct.target.iOS15, **options)
    close(plain[0, :, :, 0], np.stack([np.zeros(3), X[1, :, 2, 3], np.zeros(3)], -1))


def test_a_neighbour_that_weighs_nothing_says_nothing() -> None:
    x = np.array([[1, np.inf], [np.nan, 2]], np.float32).reshape(1, 1, 2, 2)
    boxes = np.array([[0, 0, 0, 0], [1, 1, 1, 1]], np.float32)
    corners = np.array([[[[0, 0], [1, 1]]]], np.float32)

    def build(x: Any) -> Any:
        cropped = mb.crop_resize(x=x, boxes=boxes, box_indices=[0, 0], sampling_mode="STRICT_ALIGN_CORNERS")
        return cropped, mb.resample(
            x=x, coordinates=corners, sampling_mode="bilinear", padding_mode="border", padding_value=0.0,
            coordinates_mode="unnormalized", align_corners=True,
        )  # fmt: skip

    cropped, resampled = run(build, {"x": x})
    np.testing.assert_array_equal(cropped.ravel(), [1, 2])
    np.testing.assert_array_equal(resampled.ravel(), [1, 2])


@pytest.mark.parametrize(("opset", "empty"), [(ct.target.iOS16, (0, 2, 3, 4, 6)), (ct.target.iOS17, (0, 3, 4, 6))])
def test_no_boxes(opset: Any, empty: tuple[int, ...]) -> None:
    new, count = opset >= ct.target.iOS17, get_new_symbol()
    boxes, shape = (np.zeros((0, 4), np.float32), (count, 4)) if new else (
        np.zeros((0, 1, 4, 1, 1), np.float32), (count, 1, 4, 1, 1)
    )  # fmt: skip

    def build(x: Any, boxes: Any) -> Any:
        options = {"boxes": boxes, "box_indices": mb.fill(shape=[0], value=0)} if new else {"roi": boxes}
        return mb.crop_resize(x=x, target_height=4, target_width=6, **options)

    shapes = {"boxes": (0, 4) if new else shape}
    assert run(build, {"x": X, "boxes": boxes}, opset=opset, shapes=shapes)[0].shape == empty


@pytest.mark.parametrize(("padding", "expected"), [("constant", [9, 9, 9]), ("border", [2, 1, 1])])
@pytest.mark.parametrize("sampling", ["bilinear", "nearest"])
def test_far_away_coordinates(padding: str, expected: list[float], sampling: str) -> None:
    x = np.array([[1.0, 2.0]], np.float32).reshape(1, 1, 1, 2)
    coordinates = np.array([[[[np.inf, 0], [-np.inf, 0], [-1e30, 0]]]], np.float32)

    def build(x: Any, coordinates: Any) -> Any:
        return mb.resample(
            x=x, coordinates=coordinates, sampling_mode=sampling, padding_mode=padding, padding_value=9.0,
            coordinates_mode="unnormalized", align_corners=True,
        )  # fmt: skip

    found = run(build, {"x": x, "coordinates": coordinates})[0]
    np.testing.assert_array_equal(found.ravel(), expected)


@law
@given(seed=st.integers(0, 20), height=SIZES, width=SIZES)
def test_affine_is_torchs(seed: int, height: int, width: int) -> None:
    matrix = draw(seed, 2, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a grid of one point has changed since its 1.3
        grid = functional.affine_grid(torch.from_numpy(matrix).double().reshape(2, 2, 3), (2, 3, height, width), True)
    expected = functional.grid_sample(torch.from_numpy(X).double(), grid, align_corners=True)

    def build(x: Any, matrix: Any) -> Any:
        return mb.affine(
            x=x, transform_matrix=matrix, output_height=height, output_width=width, sampling_mode="bilinear",
            padding_mode="constant", padding_value=0.0, coordinates_mode="normalized_minus_one_to_one",
            align_corners=True,
        )  # fmt: skip

    close(run(build, {"x": X, "matrix": matrix})[0], expected)
