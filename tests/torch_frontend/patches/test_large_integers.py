"""Integer constants beyond int32."""

from __future__ import annotations

from collections.abc import Callable

import coremltools as ct
import numpy as np
import pytest
import torch

from mil_ane_passes.torch_frontend.errors import NotConverted

from ..checks import FRONTENDS, check, convert, outputs

X = torch.tensor([[1.0, 2, -3], [0, 1e-3, 5]])
IDS = torch.tensor([[-7, -3, 0], [2, 5, 7]], dtype=torch.int32)
LARGE = torch.tensor([2**31, 2**33, -2**40])


class WithBuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", LARGE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x * self.numbers, self.numbers.float() - x, torch.where(x > 1, x, self.numbers)


def compute_floats(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 4294967296, x / 4294967296, x + 3000000000, 3000000000 - x, x * 3000000000, 4294967296 / (x + 7),
            (x * 1e15).clamp(max=1099511627776), (x * 1e15).clamp(min=-1099511627776, max=4294967296),
            x.masked_fill(x > 1, -1099511627776), x.masked_fill(x > 1, 9223372036854775807),
            torch.where(x > 1, 1099511627776, x), torch.full([2, 3], 1099511627776, dtype=torch.float32) + x,
            torch.full_like(x, -1099511627776) + x, x.new_full([3], 1099511627776), x * -2147483648]


def compute_integers(ids: torch.Tensor) -> list[torch.Tensor]:
    ids = ids.long()
    return [ids < 8589934592, ids >= -8589934592, ids == 8589934592, ids.clamp(min=-1099511627776),
            ids.clamp(-9223372036854775807, 9223372036854775807), ids.clamp(max=8589934592), ids / 4294967296,
            ids.masked_fill(ids < 0, 9223372036854775807).amin(1),
            torch.where(ids < 0, 9223372036854775807, ids).amin(1)]


def compute_filled(x: torch.Tensor) -> list[torch.Tensor]:
    filled = torch.full([2, 3], 1099511627776)
    return [filled + x, filled.float() - x, x < filled, torch.full_like(x, 3).long() < filled]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_large_integers_beside_floats(frontend: str) -> None:
    check(compute_floats, X, frontend=frontend, rtol=1e-6, atol=0)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_large_integers_that_bound_integers(frontend: str) -> None:
    check(compute_integers, IDS, frontend=frontend, rtol=1e-6, atol=0)
    if frontend != "script":  # a literal below -2**63 + 1 is none of a script
        check(lambda ids: ids.long().clamp(-2**63, 2**63 - 1), IDS, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_large_integers_of_a_buffer_and_of_a_constant(frontend: str) -> None:
    check(WithBuffer().eval(), X, frontend=frontend, rtol=1e-6, atol=0)
    check(compute_filled, X, frontend=frontend, rtol=1e-6, atol=0)
    if frontend != "script":
        check(lambda x: x + torch.tensor([2**33, 5, -2**40]), X, frontend=frontend, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [
    lambda ids: (ids.long() * 2654435761) % 1024, lambda ids: (ids.long() + 3000000000) // 1000,
    lambda ids: 3000000000 - ids.long(), lambda ids: ids.long() % 4294967296, lambda ids: ids.long() // 4294967296,
    lambda ids: torch.div(ids.long(), 4294967296, rounding_mode="floor"), lambda ids: ids.long() * LARGE],
    ids=["hash", "sum", "difference", "remainder", "quotient", "div", "tensor"])
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_integers_that_int32_cannot_hold_are_an_error(function: Callable[..., torch.Tensor], frontend: str) -> None:
    with pytest.raises(NotConverted, match=r"computes integers with -?\d{10,}, and Core ML has int32 only; use "):
        convert(function, (IDS,), frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_open_ends_of_slices_and_limits_of_int32_are_left_alone(frontend: str) -> None:
    check(lambda ids: (ids[:, 1:] + 2147483640 - 2147483640, ids[..., ::2].clamp(-2147483648, 2147483647)), IDS,
          frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_other_readers_of_large_integers_are_named(frontend: str, caplog: pytest.LogCaptureFixture) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("numbers", LARGE)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.numbers[ids.long()].float()

    with caplog.at_level("WARNING", "mil_ane_passes"):
        convert(Table().eval(), (torch.tensor([0, 2], dtype=torch.int32),), frontend)
    assert "reads integers beyond int32, such as -1099511627776, which become the closest int32" in caplog.text


def test_large_integers_at_fp16() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 5).clamp(max=1099511627776), torch.where(x > 1, -1099511627776, x).softmax(-1)

    mlmodel = convert(function, (X,), precision=ct.precision.FLOAT16)
    for found, expected in zip(outputs(mlmodel, (X,), precision="float16"), function(X), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=2e-3)
