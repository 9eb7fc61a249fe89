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


@pytest.mark.sampled(12)
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
