"""Adaptive pools of flexible sizes and in 3-D give the values of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check

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


@FRONTENDS
def test_windows_that_depend_on_a_flexible_size_are_refused(frontend: str) -> None:
    with pytest.raises(NotConverted, match=r"adaptive_avg_pool1d.*: pools \[is\d+\] to \[3\]: the windows depend on a "
                                           r"flexible size; fix the pooled sizes, or pool to one element"):
        check(lambda x: F.adaptive_avg_pool1d(x, 3), torch.randn(SHAPES[1]), frontend=frontend, flexible=[2])
