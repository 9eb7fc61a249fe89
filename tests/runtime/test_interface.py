"""What a package says of its inputs is asked before anything runs: shapes in the allowed set, images, defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools import proto

import mil_ane_passes as ane
from mil_ane_passes.runtime.images import pixels_from_array
from mil_ane_passes.runtime.model_description import apply_description, get_array_dtype


def package(tmp_path: Path, shape: Any, channels: int = 3) -> Path:
    path = tmp_path / "model.mlpackage"
    traced = torch.jit.trace(torch.nn.ReLU(), torch.ones(1, channels, 8, 8))
    inputs = [shape if isinstance(shape, ct.ImageType) else ct.TensorType("x", shape)]
    ct.convert(traced, inputs=inputs, compute_precision=ct.precision.FLOAT32, skip_model_load=True,
               minimum_deployment_target=ct.target.iOS16).save(str(path))
    return path


def zeros(*shape: int) -> dict[str, Any]:
    return {"x": np.zeros(shape, np.float32)}


ENUMERATED = ct.EnumeratedShapes([(1, 3, 8, 8), (1, 3, 16, 8), (1, 3, 8, 4)])
RANGED = (1, 3, ct.RangeDim(4, 16, 8), ct.RangeDim(8, 300, 8))


class TestShapes:
    def test_each_enumerated_shape_runs(self, tmp_path: Path) -> None:
        path = package(tmp_path, ENUMERATED)
        for shape in ((1, 3, 8, 8), (1, 3, 16, 8), (1, 3, 8, 4)):
            (found,) = ane.run(path, zeros(*shape)).values()
            assert found.shape == shape

    def test_between_the_enumerated_shapes(self, tmp_path: Path) -> None:
        with pytest.raises(ane.InputError, match=r"feed 'x': found shape \(1, 3, 16, 4\), expected one of "
                                                 r"\(1, 3, 8, 8\), .*\(1, 3, 16, 8\)"):
            ane.run(package(tmp_path, ENUMERATED), zeros(1, 3, 16, 4))

    def test_both_ends_of_a_range(self, tmp_path: Path) -> None:
        path = package(tmp_path, RANGED)
        for shape in ((1, 3, 4, 8), (1, 3, 16, 300)):
            (found,) = ane.run(path, zeros(*shape)).values()
            assert found.shape == shape

    @pytest.mark.parametrize("shape, said", [
        ((1, 3, 17, 8), "found 17 for axis 2, expected 4 to 16"),
        ((1, 3, 3, 8), "found 3 for axis 2, expected 4 to 16"),
        ((1, 3, 8, 7), "found 7 for axis 3, expected 8 to 300"),
        ((1, 4, 8, 8), r"found 4 for axis 1, expected 3 to 3"),
    ])
    def test_outside_a_range(self, tmp_path: Path, shape: tuple[int, ...], said: str) -> None:
        with pytest.raises(ane.InputError, match=rf"feed 'x' \(shape .*\): {said}"):
            ane.run(package(tmp_path, RANGED), zeros(*shape))


    def test_an_open_end(self) -> None:
        description = proto.Model_pb2.ModelDescription()
        array = description.input.add(name="x").type.multiArrayType
        array.shapeRange.sizeRanges.add(lowerBound=2, upperBound=-1)
        assert apply_description(description, {"x": np.zeros(1000)})["x"].shape == (1000,)
        with pytest.raises(ane.InputError, match="found 1 for axis 0, expected 2 to unbounded"):
            apply_description(description, {"x": np.zeros(1)})


class TestDtypes:
    @pytest.mark.parametrize("value, found", [(np.zeros((1, 3, 8, 8), np.int64), "int64"),
                                              (np.zeros((1, 3, 8, 8), bool), "bool"),
                                              (np.zeros((1, 3, 8, 8), complex), "complex128"),
                                              (np.full((1, 3, 8, 8), "a"), "<U1")])
    def test_another_dtype(self, tmp_path: Path, value: Any, found: str) -> None:
        with pytest.raises(ane.InputError, match=f"feed 'x': found dtype {found}, expected fp32"):
            ane.run(package(tmp_path, (1, 3, 8, 8)), {"x": value})


class TestImages:
    def test_pixels_as_image_libraries_hold_them(self, tmp_path: Path) -> None:
        path = package(tmp_path, ct.ImageType("x", (1, 3, 8, 6), color_layout=ct.colorlayout.BGR, bias=[-1, -2, -3]))
        pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3)).astype(np.uint8)
        (found,) = ane.run(path, {"x": pixels}).values()
        bgr = pixels[..., ::-1].transpose(2, 0, 1)[None].astype(np.float32)
        expected = np.maximum(bgr - np.array([1, 2, 3], np.float32).reshape(3, 1, 1), 0)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        (laid_out,) = ane.run(path, {"x": bgr}).values()
        np.testing.assert_array_equal(laid_out, found)

    @pytest.mark.parametrize("layout", [ct.colorlayout.RGB, ct.colorlayout.BGR, ct.colorlayout.GRAYSCALE])
    def test_bytes_in_the_layout_of_the_program(self, tmp_path: Path, layout: Any) -> None:
        """The values of uint8 are pixels; channels are in the order of the model, as those of floats are."""
        channels = 1 if layout == ct.colorlayout.GRAYSCALE else 3
        path = package(tmp_path, ct.ImageType("x", (1, channels, 8, 6), color_layout=layout), channels)
        planes = np.random.default_rng(0).integers(0, 256, (1, channels, 8, 6)).astype(np.uint8)
        for given in (planes, planes[0], planes.astype(np.float32)):
            (found,) = ane.run(path, {"x": given}).values()
            np.testing.assert_array_equal(found, planes)
            assert found.dtype == np.float32

    @pytest.mark.parametrize(("layout", "shape", "dtype", "said"), [
        ("RGB", (1, 8, 6, 3), np.float32, "found shape (1, 8, 6, 3), with the channels last; expected (1, 3, 8, 6): "
                                          "transpose it with array.transpose(0, 3, 1, 2)"),
        ("BGR", (8, 6, 3), np.float32, "found shape (8, 6, 3), with the channels last; expected (1, 3, 8, 6), channels "
                                       "in the order BGR: transpose it with array.transpose(2, 0, 1)[None]"),
        ("RGB", (1, 8, 6, 3), np.uint8, "array.transpose(0, 3, 1, 2), or pass array[0], pixels (height, width, 3)"),
        ("GRAYSCALE", (1, 8, 6, 1), np.uint8, "expected (1, 1, 8, 6): transpose it with array.transpose(0, 3, 1, 2), "
                                              "or pass array[0, ..., 0], pixels (height, width)"),
        ("RGB", (1, 3, 8, 6), np.int64, "found dtype int64; expected a PIL image, uint8 pixels (height, width, 3), or "
                                        "(1, 3, height, width) with values from 0 to 255, uint8 or float"),
        ("GRAYSCALE", (1, 1, 8, 6), np.bool_, "uint8 pixels (height, width), or (1, 1, height, width)"),
        ("RGB", (1, 3, 6, 8), np.uint8, "found an image of height 6, width 8, expected height 8, width 6; resize it"),
        ("RGB", (1, 1, 8, 6), np.uint8, "found shape (1, 1, 8, 6), expected fp32 (1, 3, 8, 6); axis 1 differs"),
    ])
    def test_arrays_that_are_no_image(self, tmp_path: Path, layout: str, shape: Any, dtype: Any, said: str) -> None:
        channels = 1 if layout == "GRAYSCALE" else 3
        image = ct.ImageType("x", (1, channels, 8, 6), color_layout=getattr(ct.colorlayout, layout))
        path = package(tmp_path, image, channels)
        with pytest.raises(ane.InputError, match=f"feed 'x': .*{re.escape(said)}"):
            ane.run(path, {"x": np.zeros(shape, dtype)})

    def test_the_wrong_size(self, tmp_path: Path) -> None:
        path = package(tmp_path, ct.ImageType("x", (1, 3, 8, 6)))
        with pytest.raises(ane.InputError, match="found an image of height 6, width 8, expected height 8, width 6"):
            ane.run(path, {"x": np.zeros((6, 8, 3), np.uint8)})

    def test_the_wrong_mode(self, tmp_path: Path) -> None:
        path = package(tmp_path, ct.ImageType("x", (1, 3, 8, 6)))
        with pytest.raises(ane.InputError, match="found an image of mode 'L', expected 'RGB'; convert it"):
            ane.run(path, {"x": np.zeros((8, 6), np.uint8)})

    def test_a_colour_layout_that_is_not_known(self) -> None:
        with pytest.raises(ane.InputError, match="the model's colour layout 0 is not known; expected RGB, BGR or"):
            pixels_from_array(np.zeros((1, 3, 8, 6), np.float32), 0)

    def test_enumerated_sizes(self, tmp_path: Path) -> None:
        sizes = ct.EnumeratedShapes([(1, 3, 8, 8), (1, 3, 16, 8)])
        path = package(tmp_path, ct.ImageType("x", sizes))
        (found,) = ane.run(path, {"x": np.zeros((16, 8, 3), np.uint8)}).values()
        assert found.shape == (1, 3, 16, 8)
        with pytest.raises(ane.InputError, match=r"height 8, width 16, expected one of \(8, 8\), \(16, 8\)"):
            ane.run(path, {"x": np.zeros((8, 16, 3), np.uint8)})

    def test_an_image_where_none_is_taken(self, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image").new("RGB", (8, 8))
        with pytest.raises(ane.InputError, match="found an image, expected an array"):
            ane.run(package(tmp_path, (1, 3, 8, 8)), {"x": image})


@pytest.mark.parametrize("feeds, said", [
    ([1, 2], "feeds: found a list; expected a dictionary"),
    ({"x": [[1, 2], [3]]}, "feed 'x': .*inhomogeneous.*; expected an array of numbers"),
])
def test_what_is_no_array_by_name(tmp_path: Path, feeds: Any, said: str) -> None:
    with pytest.raises(ane.InputError, match=said):
        ane.run(package(tmp_path, (1, 3, 8, 8)), feeds)


def test_arrays_have_the_dtypes_that_coremltools_names():
    kind = proto.FeatureTypes_pb2.ArrayFeatureType
    named = {**dict(kind.ArrayDataType.items()), "INT8": 0x20008}  # coremltools 8.3 reads int8 and has no name for it
    wanted = {"FLOAT16": np.float16, "FLOAT32": np.float32, "DOUBLE": np.float64, "INT32": np.int32, "INT8": np.int8,
              "INVALID_ARRAY_DATA_TYPE": None}
    assert {name: get_array_dtype(kind(dataType=number)) for name, number in named.items()} == wanted
