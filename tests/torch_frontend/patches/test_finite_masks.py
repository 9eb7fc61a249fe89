"""Masks of huge finite numbers in fp16 models."""

from __future__ import annotations

from collections.abc import Callable

import coremltools as ct
import numpy as np
import pytest
import torch

from ..checks import convert, outputs

LOWEST = torch.finfo(torch.float32).min
SCORES = torch.linspace(-20, 20, 12).reshape(3, 4)
MASK = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
BOTH = pytest.mark.parametrize("frontend", ["trace", "export"])


def halves(function: Callable[..., torch.Tensor], *feeds: torch.Tensor, frontend: str = "trace") -> np.ndarray:
    """The fp16 model on the typed runtime."""
    mlmodel = convert(function, feeds, frontend, precision=ct.precision.FLOAT16)
    return outputs(mlmodel, feeds, precision="float16")[0]


def same_rows(found: np.ndarray, expected: torch.Tensor) -> None:
    """Rows with an open place are torch's; a row masked throughout is finite and sums to 1."""
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[[0, 2]], expected.numpy()[[0, 2]], atol=5e-3)
    np.testing.assert_allclose(found.sum(-1), 1, atol=5e-3)


@BOTH
@pytest.mark.parametrize("huge", [LOWEST, -1e30, -1e9, -1e5])
def test_product(huge: float, frontend: str) -> None:
    def function(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + (1 - m) * huge, -1)

    same_rows(halves(function, SCORES, MASK, frontend=frontend), function(SCORES, MASK))


@BOTH
def test_product_with_ints_and_a_buffer(frontend: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lowest", torch.tensor(LOWEST))

        def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x + (1.0 - m.to(x.dtype)) * self.lowest, -1)

    model = Model().eval()
    same_rows(halves(model, SCORES, MASK.int(), frontend=frontend), model(SCORES, MASK.int()))


@BOTH
@pytest.mark.parametrize("huge", [LOWEST, -1e9])
def test_selected(huge: float, frontend: str) -> None:
    def function(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.masked_fill(m < 0.5, huge) + torch.where(m > 0.5, 0.0, huge), -1)

    same_rows(halves(function, SCORES, MASK, frontend=frontend), function(SCORES, MASK))


def test_const_mask_added_twice() -> None:
    bias = (1 - MASK) * LOWEST
    same_rows(halves(lambda x: torch.softmax(x + bias + bias, -1), SCORES), torch.softmax(SCORES + bias, -1))


def test_full() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + torch.full((3, 4), LOWEST).triu(1), -1)

    same_rows(halves(function, SCORES), function(SCORES))


def test_comparison_with_a_mask() -> None:
    def function(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        mask = torch.where(m > 0.5, x, LOWEST)
        return torch.cat([(mask == LOWEST).float(), (mask < -1e9).float(), (x > LOWEST).float()])

    np.testing.assert_array_equal(halves(function, SCORES, MASK), function(SCORES, MASK).numpy())


def test_numbers_that_fp16_holds_are_kept() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * 1e-5 * 1e6, x / 1e6 * 1e9 / 1e3, x.clamp(-1e9, 1e9) * 2000])

    expected = function(SCORES).numpy()
    np.testing.assert_allclose(halves(function, SCORES), expected, rtol=2e-2, atol=1e-2)


def test_infinity_stays() -> None:
    found = halves(lambda x, m: x.masked_fill(m < 0.5, -float("inf")), SCORES, MASK)
    assert np.isneginf(found[1]).all()


def test_single_precision_is_not_touched() -> None:
    mlmodel = convert(lambda x, m: x + (1 - m) * LOWEST, (SCORES, MASK))
    assert outputs(mlmodel, [SCORES, MASK])[0].min() == np.float32(LOWEST)
