"""Windows of signals."""

from __future__ import annotations

import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check

X = torch.rand(2, 6)


def windows(x: torch.Tensor) -> torch.Tensor:
    one = torch.hann_window(6) + torch.hann_window(6, periodic=False) + torch.blackman_window(6)
    two = torch.bartlett_window(6, periodic=False) + torch.hamming_window(6, True, 0.5, 0.4)
    return x * (one + two + torch.kaiser_window(6, True, 8.0))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_windows(frontend: str) -> None:
    mlmodel = check(windows, X, frontend=frontend)
    assert [op.op_type for op in mlmodel._mil_program.functions["main"].operations] == ["const", "mul"]


def test_a_length_that_is_not_known_is_refused() -> None:
    with pytest.raises(NotConverted, match="length of a window is computed by the model; fix the size"):
        check(lambda x: x * torch.hann_window(x.shape[1]), X, flexible=[1])
