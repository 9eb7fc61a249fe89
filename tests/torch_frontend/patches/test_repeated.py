"""`tile` to more axes than the input has; repeats are in the grid."""

from __future__ import annotations

import pytest
import torch

from ..checks import check


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("dims", [(2, 1, 2), (3,), (1, 2), (2, 2, 1, 3)])
def test_tile_adds_axes_in_front(dims: tuple[int, ...], frontend: str) -> None:
    check(lambda x: x.tile(dims), torch.arange(6.0).reshape(2, 3), frontend=frontend)
