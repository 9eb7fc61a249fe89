"""Sizes that are computed from others and read by several ops."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch
from torch.nn.functional import interpolate

from ..checks import check


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_computed_sizes_of_a_table_and_of_a_reshape(frontend: str) -> None:
    """Positions of Depth Anything and DPT: the number of patches sizes the tokens and the table of positions."""
    class Patches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(1, 3, 5, 5), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, w = x.shape[2] // 4, x.shape[3] // 4
            tokens = torch.nn.functional.avg_pool2d(x, 4).flatten(2)
            return tokens.reshape((1, 3, h, w)) + interpolate(self.table, size=(h, w), mode="bilinear")

    check(Patches().eval(), torch.randn(1, 3, 8, 12), frontend=frontend, flexible=[2, 3], lowest=8,
          at=[(torch.randn(1, 3, 16, 8),)], target=ct.target.iOS17)
