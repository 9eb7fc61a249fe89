"""One element of a small concat."""

from __future__ import annotations

import torch

from ..checks import check


def test_floats_and_ints() -> None:
    check(lambda x: torch.cat([x, x * 2])[3] + torch.cat([x.to(torch.int64), x.to(torch.int64)])[0],
          torch.tensor([1.5, 2.5]))


def test_sizes_are_still_followed() -> None:
    def reshaped(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(torch.Size([x.shape[1], x.shape[0]])) * 1

    check(reshaped, torch.arange(6.).reshape(2, 3), flexible=(0,), at=[[torch.arange(12.).reshape(4, 3)]])
