"""log_softmax and logcumsumexp where exponentials overflow and probabilities vanish."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane

from ..checks import FRONTENDS, captured, check, input_types, outputs

X = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)) * 300


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_log_softmax_falls_below_the_floor_of_log(frontend: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x, 1) + torch.nn.functional.log_softmax(x[:, :, :1], -1)

    assert model(X).min() < -500
    check(model, X, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_a_running_log_sum_exp_does_not_overflow(frontend: str, dim: int) -> None:
    class Running(torch.nn.Module):
        __constants__ = ("dim",)

        def __init__(self) -> None:
            super().__init__()
            self.dim = dim

        def forward(self, x):
            return torch.logcumsumexp(x, self.dim)

    model = Running().eval()
    assert model(X).max() > 89 and model(X).isfinite().all()
    check(model, X, frontend=frontend)


@pytest.mark.parametrize("dim", [0, 1])
def test_flexible_sizes(dim: int) -> None:
    x = X[0]
    other = torch.cat([x, x])
    check(lambda x: torch.logcumsumexp(x, dim), x, flexible=[0], at=[(other,)], frontend="export")
    check(lambda x: torch.log_softmax(x, dim), x, flexible=[0], at=[(other,)])


def test_two_equal_infinities() -> None:
    """Their difference is NaN."""
    x = torch.tensor([[-np.inf, -np.inf, 1.0, -np.inf, 2.0], [3.0, np.inf, 1.0, np.inf, -np.inf]])
    check(lambda x: torch.logcumsumexp(x, 1), x)


def test_through_our_own_pipeline_in_fp16() -> None:
    x = X / 10
    model = ane.convert(captured(lambda x: torch.log_softmax(x, 1), [x], "trace"), inputs=input_types([x]),
                        skip_model_load=True, minimum_deployment_target=ct.target.iOS16)
    np.testing.assert_allclose(outputs(model, [x])[0], torch.log_softmax(x, 1), rtol=2e-2, atol=2e-2)
