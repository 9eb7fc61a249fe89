"""Bicubic, trilinear and nearest-exact interpolation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate

from ..checks import check

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


@pytest.mark.parametrize("mode", ["bicubic", "nearest-exact"])
def test_scales_that_are_not_whole_in_single_precision(mode: str) -> None:
    check(lambda x: interpolate(x, scale_factor=(0.7, 1.3), mode=mode), torch.randn(1, 1, 10, 10))


def test_trilinear() -> None:
    video = torch.randn(1, 2, 3, 4, 5)
    check(lambda x: interpolate(x, size=(5, 3, 7), mode="trilinear"), video)
    check(lambda x: interpolate(x, scale_factor=2, mode="trilinear", align_corners=True), video)


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
