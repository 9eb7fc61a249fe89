"""Adaptive pools of flexible sizes and in 3-D give the values of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check, convert, outputs

SHAPES = {1: (2, 3, 8), 2: (2, 3, 8, 6), 3: (2, 3, 8, 6, 4)}
FRONTENDS = pytest.mark.parametrize("frontend", ["trace", "export"])


@FRONTENDS
@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("rank", SHAPES)
def test_one_element_of_a_flexible_size(rank: int, kind: str, frontend: str) -> None:
    pool = getattr(F, f"adaptive_{kind}_pool{rank}d")
    shape = SHAPES[rank]
    check(lambda x: pool(x, 1), torch.randn(shape), frontend=frontend, flexible=[2],
          at=[[torch.randn(2, 3, size, *shape[3:])] for size in (5, 11)])


@pytest.mark.sampled(6)
@FRONTENDS
@pytest.mark.parametrize(("rank", "sizes"), [
    (1, 1), (1, 4), (1, 3), (1, 8), (2, (1, 6)), (2, (1, None)), (2, (None, 3)), (2, (3, 4)), (2, (8, 6)), (3, 1),
    (3, (4, 3, 2)), (3, (1, None, 1)), (3, (8, 6, 1)), (3, (2, 1, 4)), (3, (3, 4, 3))])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_fixed_sizes(rank: int, sizes: Any, kind: str, frontend: str) -> None:
    pool = getattr(F, f"adaptive_{kind}_pool{rank}d")
    check(lambda x: pool(x, sizes), torch.randn(SHAPES[rank]), frontend=frontend)
    check(lambda x: pool(x[0], sizes), torch.randn(SHAPES[rank]), frontend=frontend)


def test_one_axis_of_a_flexible_size() -> None:
    check(lambda x: F.adaptive_avg_pool2d(x, (1, 6)), torch.randn(SHAPES[2]), flexible=[2],
          at=[[torch.randn(2, 3, 5, 6)]])


_KEPT_SIZES = [(2, (1, None), 3), (2, (None, 1), 2), (2, (5, None), 3), (2, (None, 3), 2), (2, (None, None), 3),
               (3, (1, None, 1), 3), (3, (2, None, 3), 3), (3, (None, 1, None), 2)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("rank", "sizes", "axis"), _KEPT_SIZES)
@pytest.mark.parametrize(("kind", "frontend"), [("avg", "trace"), ("max", "trace"), ("avg", "export")])
def test_a_flexible_axis_that_keeps_its_size(rank: int, sizes: Any, axis: int, kind: str, frontend: str) -> None:
    """Export of a maximum fixes the size: torch has no symbolic shape for it."""
    pool = getattr(torch.nn, f"Adaptive{kind.title()}Pool{rank}d")(sizes)
    shape = list(SHAPES[rank])
    at = [[torch.randn(*shape[:axis], size, *shape[axis + 1:])] for size in (3, 9)]
    check(lambda x: pool(x), torch.randn(shape), frontend=frontend, flexible=[axis], at=at)
    check(lambda x: pool((x * 2)[0]), torch.randn(shape), frontend=frontend, flexible=[axis], at=at)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_a_flexible_axis_to_the_size_that_the_model_reads(frontend: str) -> None:
    def pool(x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, (3, x.shape[3]))

    check(pool, torch.randn(SHAPES[2]), frontend=frontend, flexible=[3], at=[[torch.randn(2, 3, 8, 13)]])


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("before", [
    torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.Conv2d(3, 4, 3), torch.nn.MaxPool2d(2), torch.nn.Upsample(scale_factor=2),
    torch.nn.ZeroPad2d((1, 2, 0, 0)), torch.nn.ConvTranspose2d(3, 4, 2, 2)])
def test_a_flexible_axis_of_a_layer_that_keeps_its_size(before: torch.nn.Module, frontend: str) -> None:
    """Export computes the size of the layer's result from that of the input."""
    model = torch.nn.Sequential(before, torch.nn.AdaptiveAvgPool2d((1, None))).requires_grad_(False)
    check(lambda x: model(x), torch.randn(SHAPES[2]), frontend=frontend, flexible=[3], lowest=4,
          at=[[torch.randn(2, 3, 8, size)] for size in (5, 13)])


@FRONTENDS
@pytest.mark.parametrize(("other", "divisor"), [(2, 1), (3, 2)])
def test_another_computed_size_is_refused(other: int, divisor: int, frontend: str) -> None:
    """The size of another axis, or half of the own one."""
    with pytest.raises(NotConverted, match="adaptive_avg_pool2d.*'output_size' is computed by the model"):
        check(lambda x: F.adaptive_avg_pool2d(x, (1, x.shape[other] // divisor)), torch.randn(SHAPES[2]),
              frontend=frontend, flexible=[2, 3], lowest=6)


@pytest.mark.sampled(4)
@FRONTENDS
@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize(("rank", "sizes"), [(1, 4), (1, 3), (2, (4, 3)), (2, (3, 4)), (3, (4, 3, 2)), (3, 3)])
def test_pools_of_a_flexible_batch(rank: int, sizes: Any, kind: str, frontend: str) -> None:
    pool = getattr(F, f"adaptive_{kind}_pool{rank}d")
    check(lambda x: pool(x, sizes), torch.randn(SHAPES[rank]), frontend=frontend, flexible=[0],
          at=[[torch.randn(5, *SHAPES[rank][1:])]])


_FLEXIBLE_WINDOWS = [(1, 3, (2,)), (1, 6, (0, 2)), (2, 2, (2, 3)), (2, (3, 6), (2, 3)), (2, 6, (0, 2, 3)),
                     (2, (3, 4), (2,)), (2, (3, 6), (2,)), (2, (1, 4), (2, 3)), (3, 3, (2, 3, 4)), (3, (1, 5, 4), (3,)),
                     (3, (2, None, 3), (0, 2, 4))]


def _make_feeds(rank: int, flexible: Sequence[int], sizes: Sequence[int] = (2, 5, 13, 24)) -> list[list[torch.Tensor]]:
    """Make a feed for each size, whose flexible axes have different sizes."""
    return [[torch.randn([size + axis if axis in flexible else own for axis, own in enumerate(SHAPES[rank])])]
            for size in sizes]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("rank", "sizes", "flexible"), _FLEXIBLE_WINDOWS)
@FRONTENDS
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_windows_of_a_flexible_size(rank: int, sizes: Any, flexible: tuple[int, ...], kind: str, frontend: str) -> None:
    pool = getattr(F, f"adaptive_{kind}_pool{rank}d")
    x, at = torch.randn(SHAPES[rank]), _make_feeds(rank, flexible)
    check(lambda x: pool(x, sizes), x, frontend=frontend, flexible=flexible, at=at)
    check(lambda x: pool((x * 2)[0], sizes), x, frontend=frontend, flexible=flexible, at=at)


@pytest.mark.parametrize("sizes", [(None, 3), (3, None)])
@pytest.mark.parametrize(("kind", "frontend"), [("avg", "trace"), ("max", "trace"), ("avg", "export")])
def test_windows_beside_a_flexible_axis_that_keeps_its_size(sizes: Any, kind: str, frontend: str) -> None:
    """Export of a maximum fixes a size that is kept: torch has no symbolic shape for it."""
    pool = getattr(torch.nn, f"Adaptive{kind.title()}Pool2d")(sizes)
    check(lambda x: pool(x), torch.randn(SHAPES[2]), frontend=frontend, flexible=[2, 3], at=_make_feeds(2, [2, 3]))


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_fewer_elements_than_windows(kind: str) -> None:
    """Windows of one element, of which neighbors are the same."""
    pool = getattr(F, f"adaptive_{kind}_pool2d")
    check(lambda x: pool(x, (6, 5)), torch.randn(SHAPES[2]), flexible=[2, 3], lowest=1,
          at=_make_feeds(2, [2, 3], (-1, 0, 1, 3)))


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_an_infinite_element_is_in_its_windows_alone(kind: str) -> None:
    pool = getattr(F, f"adaptive_{kind}_pool1d")
    infinite = torch.arange(66.0).reshape(2, 3, 11)
    infinite[0, 0, 4], infinite[1, 2, 10] = torch.inf, -torch.inf
    check(lambda x: pool(x, 4), torch.randn(SHAPES[1]), flexible=[2], at=[[infinite]])


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17])
def test_windows_of_a_long_sequence_at_float16(kind: str, target: Any) -> None:
    """fp16 holds no odd position above 2048, and 16 bits none above 32767."""
    pool = getattr(F, f"adaptive_{kind}_pool1d")
    inputs = [ct.TensorType("x", shape=(1, 2, ct.RangeDim(1, 100_000, default=64)))]
    mlmodel = convert(lambda x: pool(x, 7), [torch.randn(1, 2, 64)], target=target, precision=ct.precision.FLOAT16,
                      inputs=inputs)
    for size in (3, 4099, 98_765):
        x = torch.zeros(1, 2, size)
        for place in range(7):  # around the ends of each window
            x[0, 0, place * size // 7], x[0, 1, (place + 1) * size // 7 - 1] = 4 + place, 2 * place
        found, = outputs(mlmodel, [x], "float16")
        np.testing.assert_allclose(found, pool(x, 7), rtol=2e-3, atol=1e-5)


class _PyramidPooling(torch.nn.Module):
    """Pool to 1, 2, 3 and 6, then resize to the size of x, as PSPNet and UperNet do."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Sequential(
            torch.nn.AdaptiveAvgPool2d(size), torch.nn.Conv2d(3, 2, 1, bias=False), torch.nn.BatchNorm2d(2),
            torch.nn.ReLU()) for size in (1, 2, 3, 6))
        self.last = torch.nn.Conv2d(11, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        resized = [F.interpolate(branch(x), size=x.shape[2:], mode="bilinear", align_corners=False)
                   for branch in self.branches]
        return self.last(torch.cat([x, *resized], dim=1))


@FRONTENDS
def test_pyramid_pooling_of_a_flexible_image(frontend: str) -> None:
    model, at = _PyramidPooling().requires_grad_(False).eval(), _make_feeds(2, [2, 3], (0, 3, 11, 24))
    check(model, torch.randn(SHAPES[2]), frontend=frontend, flexible=[2, 3], target=ct.target.iOS17, at=at)
    half = convert(model, [torch.randn(SHAPES[2])], frontend, flexible=[2, 3], target=ct.target.iOS17,
                   precision=ct.precision.FLOAT16)
    for x, in at:
        np.testing.assert_allclose(outputs(half, [x], "float16")[0], model(x), rtol=1e-2, atol=1e-2)
