"""Bicubic, trilinear and nearest-exact interpolation."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types
from torch.nn.functional import interpolate

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted
from mil_ane_passes.torch_frontend.patches import resampling

from ..checks import check, convert, outputs

IMAGE = torch.randn(1, 2, 6, 8)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("corners", [False, True])
def test_bicubic(frontend: str, corners: bool) -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        larger = interpolate(x, scale_factor=(1.5, 2.3), mode="bicubic", align_corners=corners)
        return interpolate(larger, size=(5, 4), mode="bicubic", align_corners=corners)

    check(resize, IMAGE, frontend=frontend)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(3, 4), (9, 5), (1, 20)])
def test_antialiased(size: tuple[int, int], mode: str) -> None:
    check(lambda x: interpolate(x, size=size, mode=mode, antialias=True), IMAGE)


@pytest.mark.parametrize("flexible", [[], [2]])
def test_antialiased_bilinear_that_enlarges_is_the_hosts_op(flexible: list[int]) -> None:
    mlmodel = check(lambda x: interpolate(x, scale_factor=2, mode="bilinear", antialias=True), IMAGE,
                    flexible=flexible)
    assert "matmul" not in {op.op_type for op in mlmodel._mil_program.functions["main"].operations}


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("resize", [
    {"size": (9, 13), "align_corners": True}, {"scale_factor": 2, "align_corners": True}, {"scale_factor": 1.3},
    {"scale_factor": (1.3, 2)}])
def test_antialiased_bilinear_that_enlarges(frontend: str, resize: dict[str, Any]) -> None:
    """With aligned corners it is not the plain one."""
    check(lambda x: interpolate(x, mode="bilinear", antialias=True, **resize), IMAGE, frontend=frontend)


@pytest.mark.parametrize("mode", ["bicubic", "nearest-exact"])
def test_scales_that_are_not_whole_in_single_precision(mode: str) -> None:
    check(lambda x: interpolate(x, scale_factor=(0.7, 1.3), mode=mode), torch.randn(1, 1, 10, 10))


def test_trilinear() -> None:
    video = torch.randn(1, 2, 3, 4, 5)
    check(lambda x: interpolate(x, size=(5, 3, 7), mode="trilinear"), video)
    check(lambda x: interpolate(x, scale_factor=2, mode="trilinear", align_corners=True), video)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("scale", [1.7, 0.45, 2.5, 1.3, (1.5, 0.7), (2.0, 0.5)])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_scale_that_rounds_a_size_is_that_of_torch(mode, scale, frontend):
    image = torch.linspace(-3, 4, 2 * 3 * 9 * 11).reshape(2, 3, 9, 11).sin()
    check(lambda x: torch.nn.functional.interpolate(x, scale_factor=scale, mode=mode), image, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("scale", [1.7, 0.6, 2.0])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_a_scale_that_rounds_a_length_is_that_of_torch(mode, scale, frontend):
    signal = torch.linspace(-3, 4, 2 * 3 * 13).reshape(2, 3, 13).sin()
    check(lambda x: torch.nn.functional.interpolate(x, scale_factor=scale, mode=mode), signal, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("scale", [0.29, 1.618034, (2.0, 0.58), (0.57, 0.5)])
def test_nearest_of_a_flexible_size_by_a_scale_that_may_round_it_is_refused(scale, frontend):
    image = torch.randn(1, 2, 8, 10)
    axis, by = (3, 0.58) if scale == (2.0, 0.58) else (2, scale[0] if isinstance(scale, tuple) else scale)
    with pytest.raises(NotConverted, match=f"resizes axis {axis} of an image of flexible size to the nearest "
                                               f"elements by {by:g}, where Core ML's op uses the ratio"):
        check(lambda x: interpolate(x, scale_factor=scale, mode="nearest"), image, frontend=frontend, flexible=[2, 3],
              lowest=8)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("scale", [3.0, 0.5, (2.0, 0.5)])
def test_nearest_of_a_flexible_size_by_a_whole_scale_or_a_half(scale, frontend):
    image = torch.linspace(-3, 4, 2 * 9 * 11).reshape(1, 2, 9, 11).sin()
    check(lambda x: interpolate(x, scale_factor=scale, mode="nearest"), image, frontend=frontend, flexible=[2, 3],
          lowest=8, at=[[torch.randn(1, 2, 23, 8)]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("scale", [0.5, 0.25, 1.5, 1.7, (0.75, 2.0), (0.4, 0.5)])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_flexible_image_is_resized_by_a_fraction(mode, scale, frontend):
    """Compared with torch at float64: at float32 torch rounds the sources of 68 pixels by up to 4e-6 of a pixel."""
    def resize(x: torch.Tensor) -> torch.Tensor:
        return interpolate(x, scale_factor=scale, mode=mode)

    mlmodel = convert(resize, [torch.randn(1, 2, 8, 12)], frontend, flexible=[2, 3], lowest=8)
    for shape in ((8, 12), (23, 9), (40, 31)):
        x = torch.randn(1, 2, *shape)
        np.testing.assert_allclose(outputs(mlmodel, [x])[0], resize(x.double()).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("scale", [2.0, 3.0, (4.0, 1.0)])
def test_a_flexible_image_is_enlarged_with_bicubic_weights(scale, frontend):
    check(lambda x: interpolate(x, scale_factor=scale, mode="bicubic") * 2, torch.randn(1, 2, 8, 12), frontend=frontend,
          flexible=[2, 3], lowest=2, atol=1e-4, at=[(torch.randn(1, 2, 2, 9),), (torch.randn(1, 2, 40, 31),)])


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("scale", [0.5, 0.125, 2.5])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_a_flexible_sequence_is_resized_by_a_fraction(mode, scale, frontend):
    check(lambda x: interpolate(x, scale_factor=scale, mode=mode), torch.randn(2, 3, 20), frontend=frontend,
          flexible=[2], lowest=16, atol=1e-5, at=[(torch.randn(2, 3, 29),), (torch.randn(2, 3, 60),)])


def test_a_fraction_that_rounds_otherwise_is_no_fraction():
    """100 elements by 0.29 are 28 in torch, as their product is 28.999999999999996."""
    assert resampling._find_exact_fraction(0.29) is None and resampling._find_exact_fraction(0.6180339887) is None


@pytest.mark.parametrize("scale", [0.29, 1.618034])
def test_nearest_of_a_flexible_length_by_a_scale_that_may_round_it_is_refused(scale):
    with pytest.raises(NotConverted, match=f"resizes axis 2 .* by {scale:g}, where"):
        check(lambda x: interpolate(x, scale_factor=scale, mode="nearest"), torch.randn(1, 2, 12), flexible=[2])


def test_a_fixed_axis_beside_a_flexible_one_may_be_scaled_to_a_whole_size():
    check(lambda x: interpolate(x, scale_factor=(2.0, 1.5), mode="nearest"), torch.randn(1, 2, 6, 8), flexible=[2])


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("how", [{"mode": "nearest"}, {"mode": "bilinear"},
                                 {"mode": "bilinear", "align_corners": True}], ids=["nearest", "bilinear", "corners"])
def test_an_image_takes_the_computed_size_of_another(how: dict[str, Any], frontend: str) -> None:
    at = [(torch.randn(1, 2, *size),) for size in ((11, 7), (40, 33), (4, 64))]
    check(lambda x: interpolate(x[..., 1:, ::3], size=x.shape[2:], **how) + x, torch.randn(1, 2, 8, 12),
          frontend=frontend, flexible=[2, 3], at=at, atol=1e-4, lowest=4, target=ct.target.iOS17)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_a_sequence_takes_a_computed_length(mode: str, frontend: str) -> None:
    at = [(torch.randn(1, 2, size),) for size in (7, 40, 200)]
    check(lambda x: interpolate(x, size=x.shape[2] * 2 - 1, mode=mode), torch.randn(1, 2, 12), frontend=frontend,
          flexible=[2], at=at, atol=1e-4, target=ct.target.iOS17)


@pytest.mark.parametrize(("extent", "size"), [(3, 9), (46_350, 92_000), (92_000, 46_350), (131_072, 100_001)])
def test_nearest_elements_are_selected_without_overflow(extent: int, size: int) -> None:
    """Products of the sizes are beyond int32; torch itself rounds such coordinates to float32."""
    @mb.program(input_specs=[mb.TensorSpec((1, 1, get_new_symbol(), 1)), mb.TensorSpec((1,), dtype=types.int32)])
    def program(x: Any, size: Any) -> Any:
        return resampling._resize_nearest(x, [mb.squeeze(x=size, axes=[0]), mb.const(val=np.int32(1))])

    (found,) = ane.run(program, {"x": np.arange(float(extent), dtype=np.float32).reshape(1, 1, -1, 1),
                                 "size": np.array([size], np.int32)}).values()
    np.testing.assert_array_equal(found.reshape(-1), np.arange(size) * extent // size)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_an_image_of_flexible_size_takes_a_fixed_one(mode: str, frontend: str) -> None:
    check(lambda x: interpolate(x, size=(9, 20), mode=mode), torch.randn(1, 2, 8, 12), frontend=frontend,
          flexible=[2, 3], at=[(torch.randn(1, 2, 31, 5),)])


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("how", [{}, {"mode": "linear"}, {"mode": "linear", "align_corners": True}])
def test_a_sequence_of_flexible_length_takes_a_fixed_one(how: dict[str, Any], frontend: str) -> None:
    check(lambda x: interpolate(x, size=7, **how), torch.randn(2, 3, 5), frontend=frontend, flexible=[2],
          at=[(torch.randn(2, 3, size),) for size in (1, 6, 13)])


def test_a_linear_resize_to_a_computed_size_needs_ios17() -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return interpolate(x[..., 1:, ::3], size=x.shape[2:], mode="bilinear")

    with pytest.raises(ValueError, match="Unable to map torch_upsample_bilinear"):
        check(resize, torch.randn(1, 2, 8, 12), flexible=[2, 3], target=ct.target.iOS16)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_constant_table_takes_the_size_of_a_flexible_image(mode: str, frontend: str) -> None:
    """As the position embeddings of vision transformers."""
    table = torch.randn(1, 2, 4, 5)
    check(lambda x: interpolate(table, size=x.shape[2:], mode=mode) + x, torch.randn(1, 2, 8, 12), frontend=frontend,
          flexible=[2, 3], at=[(torch.randn(1, 2, 31, 5),)], atol=1e-4, target=ct.target.iOS17)


def crop_to_patches(x: torch.Tensor, **how: Any) -> torch.Tensor:
    return interpolate(x, (x.shape[2] // 4 * 4, x.shape[3] // 4 * 4), **how)


def double_size_of_another(x: torch.Tensor, **how: Any) -> torch.Tensor:
    return interpolate(torch.nn.functional.avg_pool2d(x, 2), (x.shape[2] * 2, x.shape[3] * 2), **how)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("resize", [crop_to_patches, double_size_of_another])
@pytest.mark.parametrize("how", [
    {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True}, {}, {"mode": "bicubic"},
    {"mode": "bicubic", "align_corners": True}], ids=str)
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_multiple_of_another_size_is_no_scale_of_the_image(resize: Any, how: dict[str, Any], frontend: str) -> None:
    check(lambda x: resize(x, **how), torch.randn(1, 2, 8, 12), frontend=frontend, flexible=[2, 3], lowest=4,
          at=[(torch.randn(1, 2, 13, 9),)], target=ct.target.iOS17)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_multiple_of_the_own_size_is_a_scale_of_the_image(frontend: str) -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return interpolate(y, (y.shape[2] * 2, y.shape[3] * 3), mode="bilinear")

    mlmodel = check(resize, torch.randn(1, 2, 8, 12), frontend=frontend, flexible=[2, 3], at=[(
        torch.randn(1, 2, 5, 9),)])
    assert [op.op_type for op in mlmodel._mil_program.functions["main"].operations if "upsample" in op.op_type] == [
        "upsample_bilinear"]


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_a_sequence_of_computed_length_keeps_its_rank(mode: str, frontend: str) -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        y = interpolate(x, size=x.shape[2] * 2, mode=mode)
        z = interpolate(x, size=x.shape[2] * 2 - 1, mode=mode)
        return y.transpose(1, 2)[:, 1:] + z.permute(0, 2, 1) * 2 + z.mean(-1, keepdim=True).transpose(1, 2)

    check(resize, torch.randn(2, 3, 12), frontend=frontend, flexible=[2], at=[(torch.randn(2, 3, 7),)],
          target=ct.target.iOS17)
