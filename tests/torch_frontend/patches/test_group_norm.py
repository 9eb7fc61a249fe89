"""GroupNorm of flexible sizes."""

from __future__ import annotations

import pytest
import torch

from ..checks import check


@pytest.mark.sampled(3)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize(("shape", "flexible"), [((6, 8), [0]), ((6, 8, 5), [0]), ((6, 8, 5), [0, 2]), ((2, 8, 5), [2]),
                                                 ((6, 8, 5, 4), [0, 2, 3]), ((2, 8, 5, 4, 3), [2, 3])], ids=str)
def test_flexible_sizes(shape: tuple[int, ...], flexible: list[int], frontend: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.GroupNorm(2, 8)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    other = [size + 3 if axis in flexible else size for axis, size in enumerate(shape)]
    check(module.eval(), torch.randn(shape) * 3 + 1, frontend=frontend, flexible=flexible, at=[(torch.randn(other),)])


def test_rows_of_a_view() -> None:
    """As RWKV normalizes heads."""
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.GroupNorm(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            return self.norm(x.view(batch * length, width)).view(batch, length, width)

    check(Heads().eval(), torch.randn(1, 6, 8), flexible=[1], at=[(torch.randn(1, 9, 8),)])


@pytest.mark.parametrize("affine", [False, True])
def test_channels_whose_number_is_computed(affine: bool) -> None:
    norm = torch.nn.GroupNorm(2, 8, affine=affine).eval().requires_grad_(False)
    check(lambda x: norm(x.reshape(x.shape[0] * x.shape[1], -1)).view(x.shape), torch.randn(1, 7, 8), flexible=[1],
          at=[(torch.randn(1, 4, 8),)])
