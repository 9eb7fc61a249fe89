"""Loops over ranges in scripts."""

from __future__ import annotations

import torch

from ..checks import check


def ranges(x: torch.Tensor) -> torch.Tensor:
    total = x[0] * 0
    for i in range(1, x.shape[0]):
        total += x[i] * i
    for i in range(4, 0, -2):
        total += i
    for _ in range(2, 2):
        total += 100
    return total


def test_every_range_has_its_turns() -> None:
    check(ranges, torch.arange(12.).reshape(4, 3), frontend="script")


def test_a_range_up_to_a_flexible_size() -> None:
    check(ranges, torch.arange(12.).reshape(4, 3), frontend="script", flexible=(0,),
          at=[[torch.arange(18.).reshape(6, 3)], [torch.arange(6.).reshape(2, 3)]])
