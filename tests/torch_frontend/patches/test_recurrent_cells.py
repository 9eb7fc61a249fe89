"""LSTMCell, GRUCell and RNNCell, traced and scripted, with and without a first state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ..checks import check

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Cells(nn.Module):
    def __init__(self, kind: type[nn.Module], **settings: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = kind(6, 4, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x * 2, self.cell(x))


class LstmCells(Cells):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cell(x * 2, self.cell(x))


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_step(frontend: str, bias: bool) -> None:
    check(LstmCells(nn.LSTMCell, bias=bias).eval(), X, frontend=frontend)
    check(Cells(nn.GRUCell, bias=bias).eval(), X, frontend=frontend)
    check(Cells(nn.RNNCell, bias=bias, nonlinearity="relu").eval(), X, frontend=frontend)
