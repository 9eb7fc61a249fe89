"""`prelu` of every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ..checks import FRONTENDS, check

SHAPES = [(2, 3), (2, 3, 4), (2, 3, 4, 2), (2, 3, 2, 2, 2)]


def layer(channels: int) -> nn.PReLU:
    prelu = nn.PReLU(channels).eval()
    with torch.no_grad():
        prelu.weight.copy_(torch.tensor([0.1, -0.5, 2.0])[:channels])
    return prelu


def points(*shape: int) -> torch.Tensor:
    return torch.linspace(-3, 3, torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_one_slope_a_channel(shape: tuple[int, ...], frontend: str) -> None:
    check(layer(3), points(*shape), frontend=frontend)


@pytest.mark.parametrize("shape", [(5,), *SHAPES])
def test_one_slope(shape: tuple[int, ...]) -> None:
    check(layer(1), points(*shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_flexible_batch(shape: tuple[int, ...]) -> None:
    check(layer(3), points(*shape), flexible=(0,), at=[[points(5, *shape[1:])]])


def test_flexible_channels_with_one_slope() -> None:
    check(layer(1), points(2, 3), flexible=(1,), at=[[points(2, 7)]])


def test_after_a_linear_layer() -> None:
    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(4, 3), layer(3)).eval(), points(2, 4))


def test_computed_slopes() -> None:
    check(lambda x, slopes: nn.functional.prelu(x, slopes * 2), points(2, 3, 4), torch.tensor([0.1, -0.5, 2.0]))


def test_rank_4_stays_the_op_of_its_own() -> None:
    mlmodel = check(layer(3), points(2, 3, 4, 2))
    assert mlmodel._mil_program.find_ops(op_type="prelu")
