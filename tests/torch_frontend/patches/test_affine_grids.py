"""`affine_grid` is a value like others, and one op with `grid_sample` where nothing else reads it."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import pytest
import torch
from torch.nn import functional

import mil_ane_passes as ane

from ..checks import check

THETA = torch.tensor([[[0.9, 0.1, 0.2], [-0.3, 1.1, 0.0]], [[1.0, 0.0, -0.4], [0.2, 0.7, 0.1]]])
IMAGE = torch.linspace(-2, 3, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)


def sample(image: torch.Tensor, theta: torch.Tensor, size: Any = (2, 3, 6, 7)) -> torch.Tensor:
    grid = functional.affine_grid(theta, size, align_corners=False)
    return functional.grid_sample(image, grid + image.mean() / 20, padding_mode="border", align_corners=False)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 1, 5), (2, 1, 7, 1)])
def test_a_grid_can_be_returned(size: Any, align: bool, frontend: str) -> None:
    check(lambda theta: functional.affine_grid(theta, size, align_corners=align), THETA, frontend=frontend)


@pytest.mark.parametrize("align", [False, True])
def test_a_grid_of_a_volume_can_be_computed_with(align: bool) -> None:
    theta = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    check(lambda each: functional.affine_grid(each, (2, 1, 2, 3, 4), align_corners=align) * 2, theta)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_grid_with_offsets_is_sampled_at(frontend: str) -> None:
    check(sample, IMAGE, THETA, frontend=frontend)


def test_a_constant_grid_with_offsets_is_sampled_at() -> None:
    check(lambda image: sample(image, THETA), IMAGE)


class Sampled(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        grid = functional.affine_grid(THETA, [2, 3, 4, 5], align_corners=True)
        return functional.grid_sample(image, grid, align_corners=True)


def test_a_constant_grid_that_is_sampled_only_is_one_op_with_it() -> None:
    made = ane.convert(torch.jit.trace(Sampled().eval(), IMAGE), inputs=[ct.TensorType("image", IMAGE.shape)],
                       skip_model_load=True, minimum_deployment_target=ct.target.iOS17)
    kinds = [op.op_type for op in made._mil_program.functions["main"].operations]
    assert kinds.count("affine") == 1 and "resample" not in kinds and "matmul" not in kinds


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_grid_of_a_computed_theta_is_sampled_at(frontend: str) -> None:
    def transform(image: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        grid = functional.affine_grid(theta.tanh(), [2, 3, 4, 5], align_corners=False)
        return functional.grid_sample(image, grid, align_corners=False)

    check(transform, IMAGE, THETA, frontend=frontend)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_an_image_is_transformed_as_torch_does(frontend: str, padding: str, mode: str, align: bool) -> None:
    def transform(image: torch.Tensor) -> torch.Tensor:
        grid = functional.affine_grid(THETA, [2, 3, 6, 3], align_corners=align)
        return functional.grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=align)

    check(transform, IMAGE, frontend=frontend)


def test_a_grid_and_its_samples_may_align_corners_differently() -> None:
    def transform(image: torch.Tensor) -> torch.Tensor:
        grid = functional.affine_grid(THETA, [2, 3, 6, 3], align_corners=True)
        return functional.grid_sample(image, grid, align_corners=False)

    check(transform, IMAGE)


@pytest.mark.parametrize("align", [True, False])
def test_the_grid_of_a_flexible_image(align):
    def sample(image):
        grid = functional.affine_grid(THETA, image.shape, align_corners=align)
        return functional.grid_sample(image, grid, align_corners=align), grid

    check(sample, torch.rand(2, 3, 4, 6), flexible=[2, 3],
          at=[(torch.rand(2, 3, 1, 9),), (torch.rand(2, 3, 7, 2),)])


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("align", [False, True])
def test_a_volume_is_sampled_at_a_grid_of_it(align: bool, frontend: str) -> None:
    theta = torch.tensor([[[0.9, 0.1, 0.2, 0.1], [-0.3, 1.1, 0.0, 0.2], [0.1, 0.2, 0.8, -0.4]]]).repeat(2, 1, 1)

    def turn(volume: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        grid = functional.affine_grid(theta, [2, 3, 3, 4, 5], align_corners=align)
        return functional.grid_sample(volume, grid, align_corners=align)

    volume = torch.randn(2, 3, 4, 5, 6)
    check(turn, volume, theta, frontend=frontend)
    check(lambda volume: turn(volume, theta), volume, frontend=frontend)
