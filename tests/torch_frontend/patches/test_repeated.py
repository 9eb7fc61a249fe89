"""`tile` to more axes than the input has; repeats are in the grid."""

from __future__ import annotations

import pytest
import torch

from ..checks import check


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("dims", [(2, 1, 2), (3,), (1, 2), (2, 2, 1, 3)])
def test_tile_adds_axes_in_front(dims: tuple[int, ...], frontend: str) -> None:
    check(lambda x: x.tile(dims), torch.arange(6.0).reshape(2, 3), frontend=frontend)


def test_a_computed_number_of_repeats() -> None:
    """The rows and columns of a flexible grid; exported, torch counts them by a guard that fixes a size."""
    def number_rows(x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[-2:]
        places = torch.arange(rows).repeat_interleave(columns) * 100 + torch.arange(columns).repeat(rows)
        return x.flatten(2) + places.float()

    check(number_rows, torch.randn(1, 2, 6, 8), flexible=[2, 3], at=[[torch.randn(1, 2, 5, 11)]])
    check(lambda x: x.repeat_interleave(x.shape[2] // 2, 1), torch.randn(1, 2, 6), flexible=[2],
          lowest=4, at=[[torch.randn(1, 2, 13)]])
