"""Norms whose scale is computed have the values of torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ..checks import FRONTENDS, check


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_computed_weights_and_biases(frontend):
    def model(x: torch.Tensor, scale: torch.Tensor):
        fixed = torch.ones(4)
        return (F.layer_norm(x, [4], scale, scale * 2, 1e-3), F.layer_norm(x, [4], scale * 3),
                F.layer_norm(x, [4], None, scale), F.layer_norm(x, [4], fixed, fixed * 2),
                F.layer_norm(x, [3, 4], scale.expand(3, 4)))

    check(model, torch.randn(2, 3, 4), torch.randn(4), frontend=frontend)


def test_sizes_that_a_script_takes_from_the_input():
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.layer_norm(x, x.shape[1:]), F.layer_norm(x, [x.shape[1], 4], x[0] + 2.0, x[0])

    check(model, torch.randn(2, 3, 4), frontend="script", flexible=[1], at=[[torch.randn(2, 5, 4)]])
