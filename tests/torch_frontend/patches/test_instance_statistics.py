"""InstanceNorm in eval mode: running statistics are used where they are tracked, the input's own elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ..checks import check

X = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0)) * 3 + 1


def norm(**settings: bool) -> nn.Module:
    made = nn.InstanceNorm1d(4, **settings)
    for _ in range(3):
        made(X)  # running statistics that are not those of X
    return made.eval()


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_statistics(frontend: str, tracked: bool, affine: bool) -> None:
    check(norm(track_running_stats=tracked, affine=affine), X, frontend=frontend)
