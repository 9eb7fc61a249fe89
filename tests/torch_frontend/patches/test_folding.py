"""fold of blocks that overlap."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ..checks import check


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize(("size", "kernel", "options"), [
    ((4, 5), (2, 2), {}), ((6, 6), (3, 3), {"stride": 2, "padding": 1}), ((6, 8), (2, 3), {"stride": (1, 2)}),
    ((7, 7), (3, 2), {"dilation": 2, "padding": 1, "stride": 2}), ((4, 4), (2, 2), {"stride": 2}),
], ids=str)
def test_blocks(size: tuple[int, int], kernel: tuple[int, int], options: dict[str, int], frontend: str) -> None:
    x = F.unfold(torch.randn(2, 3, *size), kernel, **options)
    check(lambda x: F.fold(x, size, kernel, **options), torch.randn_like(x), frontend=frontend)


def test_one_image_and_a_flexible_batch() -> None:
    x = torch.randn(3, 12, 9)
    check(lambda x: F.fold(x, (4, 4), 2), x, flexible=[0], at=[(torch.randn(7, 12, 9),)])
    check(lambda x: F.fold(x, (4, 4), 2), x[0])
