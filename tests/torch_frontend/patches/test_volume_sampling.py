"""`grid_sample` of volumes: every interpolation, padding and alignment, at flexible sizes and in fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import types
from torch.nn import functional

import mil_ane_passes as ane

from ..checks import captured, check, convert, module_of, outputs

BOTH = pytest.mark.parametrize("frontend", ["trace", "export"])
MODES = pytest.mark.parametrize("mode", ["bilinear", "nearest"])
PADDINGS = pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
ALIGNMENTS = pytest.mark.parametrize("align", [False, True])


def every_setting(function: Callable[..., None]) -> Callable[..., None]:
    """Run a test with each interpolation, padding and alignment."""
    return MODES(PADDINGS(ALIGNMENTS(function)))


torch.manual_seed(0)
VOLUMES = torch.randn(2, 3, 4, 5, 6)
OUTSIDE = torch.rand(2, 3, 4, 5, 3) * 6 - 3


def sampler(**options: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda volume, grid: functional.grid_sample(volume, grid, **options)


@pytest.mark.sampled(4)
@BOTH
@every_setting
def test_points_inside_and_outside_are_those_of_torch(frontend: str, mode: str, padding: str, align: bool) -> None:
    check(sampler(mode=mode, padding_mode=padding, align_corners=align), VOLUMES, OUTSIDE, frontend=frontend)


@pytest.mark.sampled(2)
@every_setting
def test_axes_of_one_element(mode: str, padding: str, align: bool) -> None:
    sample = sampler(mode=mode, padding_mode=padding, align_corners=align)
    for shape in ((2, 1, 1, 1, 1), (2, 3, 1, 5, 1), (2, 1, 4, 1, 6)):
        check(sample, torch.randn(shape), OUTSIDE[:, :1])


@pytest.mark.sampled(2)
@PADDINGS
@ALIGNMENTS
def test_elements_and_the_middles_between_them(padding: str, align: bool) -> None:
    """Ties of nearest go to the even element, and the edge of a volume is the middle of its first element or not."""
    grid = torch.linspace(-3, 3, 49).reshape(1, 1, 7, 7, 1).expand(1, 1, 7, 7, 3)
    for mode in ("bilinear", "nearest"):
        check(sampler(mode=mode, padding_mode=padding, align_corners=align), torch.randn(1, 2, 4, 5, 9), grid)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17, ct.target.iOS18])
@MODES
def test_other_targets(target: Any, mode: str) -> None:
    check(sampler(mode=mode, align_corners=False), VOLUMES, OUTSIDE, target=target)


@pytest.mark.sampled(3)
@BOTH
@every_setting
def test_flexible_volumes(frontend: str, mode: str, padding: str, align: bool) -> None:
    grid = OUTSIDE[:1]
    check(lambda volume: functional.grid_sample(volume, grid, mode=mode, padding_mode=padding, align_corners=align),
          VOLUMES[:1], frontend=frontend, flexible=(2, 3, 4), at=[(torch.randn(1, 3, 7, 2, 3),)])


@BOTH
def test_flexible_grids_and_numbers_of_volumes(frontend: str) -> None:
    def warp(volume: torch.Tensor) -> torch.Tensor:
        return functional.grid_sample(volume[:, :2], volume[:, 2:].movedim(1, 4) * 2, align_corners=False)

    check(warp, torch.randn(2, 5, 3, 4, 5), frontend=frontend, flexible=(0, 2, 4),
          at=[(torch.randn(3, 5, 6, 4, 2),), (torch.randn(5, 5, 2, 4, 9),)])


def test_a_flexible_number_of_volumes_of_one_element() -> None:
    check(lambda volume: functional.grid_sample(volume, volume.new_zeros(1, 1, 1, 2, 3).expand(
        volume.shape[0], 1, 1, 2, 3), align_corners=True), torch.randn(2, 3, 2, 2, 2), flexible=(0,), lowest=1,
          at=[(torch.randn(1, 3, 2, 2, 2),), (torch.randn(4, 3, 2, 2, 2),)])


@pytest.mark.parametrize("table", [{}, None])
def test_decomposed_exports(table: dict[Any, Any] | None) -> None:
    sample = sampler(padding_mode="border", align_corners=True)
    exported = torch.export.export(module_of(sample), (VOLUMES, OUTSIDE)).run_decompositions(table)
    mlmodel = ane.convert(exported, compute_precision=ct.precision.FLOAT32, skip_model_load=True)
    np.testing.assert_allclose(outputs(mlmodel, (VOLUMES, OUTSIDE))[0], sample(VOLUMES, OUTSIDE), atol=1e-5)


def test_exports_that_are_not_decomposed() -> None:
    sample = sampler(mode="nearest", align_corners=False)
    exported = torch.export.export(module_of(sample), (VOLUMES, OUTSIDE))
    mlmodel = ane.convert(exported, compute_precision=ct.precision.FLOAT32, skip_model_load=True)
    np.testing.assert_allclose(outputs(mlmodel, (VOLUMES, OUTSIDE))[0], sample(VOLUMES, OUTSIDE), atol=1e-5)


class ColorTable(torch.nn.Module):
    """A learned table of colors, as of an image-adaptive 3-D LUT."""

    def __init__(self, extent: int, mode: str) -> None:
        super().__init__()
        self.mode = mode
        steps = torch.linspace(0, 1, extent)
        colors = torch.stack(torch.meshgrid(steps, steps, steps, indexing="ij")).flip(0)
        self.table = torch.nn.Parameter((colors ** 1.5 + torch.rand(colors.shape) * 0.1)[None])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        grid = (image.sigmoid() * 2 - 1).permute(0, 2, 3, 1).unsqueeze(1)
        return functional.grid_sample(self.table, grid, mode=self.mode, padding_mode="border",
                                      align_corners=True).squeeze(2)


class BilateralSlice(torch.nn.Module):
    """The slice of HDRNet: affine coefficients of each pixel, from a bilateral grid and a guide."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.guide = torch.nn.Conv2d(3, 12 * 8, 4, 4), torch.nn.Conv2d(3, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        number, _, height, width = image.shape
        coefficients = self.features(image).reshape(number, 12, 8, height // 4, width // 4)
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        guide = torch.tanh(self.guide(image)).squeeze(1)
        grid = torch.stack([columns.expand_as(guide), rows.expand_as(guide), guide], -1)[:, None]
        sliced = functional.grid_sample(coefficients, grid, padding_mode="border", align_corners=False).squeeze(2)
        matrix, offset = sliced[:, :9].reshape(number, 3, 3, height, width), sliced[:, 9:]
        return (matrix * image[:, None]).sum(2) + offset


@BOTH
@pytest.mark.parametrize("model", [ColorTable(9, "bilinear"), ColorTable(17, "bilinear"), BilateralSlice()],
                         ids=["table of 9", "table of 17", "bilateral slice"])
def test_models_in_fp16_are_compared_with_torch(model: torch.nn.Module, frontend: str) -> None:
    image = torch.rand(1, 3, 16, 12)
    inputs = None if frontend == "export" else [ct.TensorType("image", image.shape)]
    mlmodel = ane.convert(captured(model.eval(), (image,), frontend), inputs=inputs, check=True, skip_model_load=True,
                          minimum_deployment_target=ct.target.iOS16)
    np.testing.assert_allclose(outputs(mlmodel, (image,), "float16")[0], model(image).detach(), atol=4e-3)


def test_fp16_models_distinguish_neighbors_of_a_long_axis() -> None:
    """A flat index above 2048, and elements of an axis above it, are not rounded to fp16."""
    volume = torch.arange(3000.0).remainder(7).reshape(1, 1, 1, 1, 3000).expand(1, 1, 2, 2, 3000).contiguous()
    places = torch.arange(2900, 2990)
    grid = torch.zeros(1, 1, 1, 90, 3)
    grid[..., 0] = (places * 2 + 1) / 3000 - 1
    for mode in ("bilinear", "nearest"):
        sample = sampler(mode=mode, align_corners=False)
        mlmodel = convert(sample, (volume, grid), precision=ct.precision.FLOAT16)
        np.testing.assert_allclose(outputs(mlmodel, (volume, grid), "float16")[0], sample(volume, grid), atol=4e-3)
        dtypes = {op.op_type: op.outputs[0].dtype for op in mlmodel._mil_program.functions["main"].operations}
        assert dtypes["floor" if mode == "bilinear" else "round"] is types.fp32
        assert dtypes["gather"] is types.fp16


def test_float16_volumes() -> None:
    volume, grid = VOLUMES.half(), OUTSIDE.half()
    sample = sampler(align_corners=False)
    mlmodel = convert(sample, (volume, grid), target=ct.target.iOS16)
    found = outputs(mlmodel, (volume, grid))[0]
    np.testing.assert_allclose(found, sample(volume.float(), grid.float()), atol=4e-3)
