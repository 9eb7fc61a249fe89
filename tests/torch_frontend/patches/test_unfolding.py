"""`Tensor.unfold`."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, captured, check, input_types, outputs

X = torch.arange(24.0).reshape(2, 12)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_few_large_and_many_small_windows(frontend: str) -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        return x.unfold(1, 10, 2).sum(1) + x.unfold(-1, 2, 1).sum(1)[:, :1]

    check(windows, X, frontend=frontend)


@pytest.mark.parametrize(("dim", "size", "step"), [(0, 2, 1), (1, 5, 3), (1, 12, 1), (-1, 1, 5), (1, 3, 4)])
def test_every_dimension(dim: int, size: int, step: int) -> None:
    check(lambda x: x.unfold(dim, size, step), X)


def test_patches_of_an_image() -> None:
    check(lambda x: x.unfold(0, 2, 2).unfold(1, 3, 3), X.reshape(4, 6))
    check(lambda x: (x > 5).unfold(1, 2, 1).int(), X)


def test_flexible_size() -> None:
    check(lambda x: x.unfold(0, 2, 1), torch.randn(4, 3), flexible=[0], at=[(torch.randn(9, 3),)])


def test_a_scalar() -> None:
    check(lambda x: x[0, 0].unfold(0, 1, 1), X)


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
@pytest.mark.parametrize("size", [2, 7])
def test_rank_5_whose_windows_are_of_rank_6(precision: ct.precision, size: int) -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("abcdlk,abk->abcdl", x.unfold(4, size, 2), torch.ones(1, 2, size))

    x = torch.rand(1, 2, 3, 4, 10)
    model = ane.convert(captured(windows, [x], "trace"), inputs=input_types([x]), skip_model_load=True,
                        compute_precision=precision)
    np.testing.assert_allclose(outputs(model, [x])[0], windows(x), rtol=2e-3)


def test_windows_of_rank_6_as_a_result_are_refused() -> None:
    with pytest.raises(NotConverted, match=r"makes a tensor of rank 6, Core ML has 5 at most .* is an output"):
        check(lambda x: x.unfold(1, 2, 1), torch.randn(1, 2, 2, 2, 2))
