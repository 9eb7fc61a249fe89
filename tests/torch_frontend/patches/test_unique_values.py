"""`unique` and `unique_consecutive`."""

from __future__ import annotations

from collections.abc import Callable

import coremltools as ct
import pytest
import torch

from mil_ane_passes.torch_frontend.errors import NotConverted

from ..checks import check, convert

X = torch.tensor([[0.5, -1.25, 2.5, 0.75], [-0.5, 2.5, 0.5, 0.5]])
COUNTED = [(X, [X.flip(1) * 0.3]), (torch.full((2, 4), 0.75), [X]),
           (torch.tensor([[3, -1, 3], [2**30 + 1, 2**30, 3]], dtype=torch.int32), [])]


def unique(x: torch.Tensor) -> list[torch.Tensor]:
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return [values, inverse, counts, torch.unique(x), torch.unique(x, return_inverse=True)[1], values[inverse] - x]


def unique_consecutive(x: torch.Tensor) -> list[torch.Tensor]:
    values, inverse, counts = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    return [values, inverse, counts, torch.unique_consecutive(x[0])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("numbers", COUNTED, ids=["floats", "equal", "ints"])
@pytest.mark.parametrize("function", [unique, unique_consecutive], ids=["unique", "consecutive"])
def test_unique_values_inverse_and_counts(
    function: Callable[..., torch.Tensor], numbers: tuple[torch.Tensor, list[torch.Tensor]], frontend: str,
    precision: object,
) -> None:
    example, others = numbers
    at = [(each,) for each in others] if precision == ct.precision.FLOAT32 else ()
    check(function, example, frontend=frontend, at=at, precision=precision)


def test_unique_of_a_flexible_length_of_bools_and_of_one_element() -> None:
    check(unique, X, flexible=(1,), at=[(torch.randn(2, 9).round(decimals=1),)])
    check(lambda x: torch.unique(x > 0, return_inverse=True, return_counts=True), X)
    check(lambda x: torch.unique(x[:1, :1], return_inverse=True, return_counts=True), X)


def test_unique_in_another_order_or_of_slices_is_refused() -> None:
    with pytest.raises(NotConverted, match="order that torch does not define; use sorted=True"):
        convert(lambda x: torch.unique(x, sorted=False), (X,))
    with pytest.raises(NotConverted, match="compares slices along an axis"):
        convert(lambda x: torch.unique_consecutive(x, dim=1), (X,))
