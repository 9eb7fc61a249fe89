"""Transposed convolutions of all paddings give the values of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..checks import check

FORMS = [
    (1, {"stride": 2, "output_padding": 1}),
    (1, {"stride": 3, "padding": 1, "output_padding": 2}),
    (1, {"stride": 2, "padding": 1, "output_padding": 1}),
    (1, {"stride": 1, "dilation": 4, "output_padding": 3}),
    (2, {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 2, "dilation": (1, 2)}),
    (2, {"stride": 3, "padding": 2, "output_padding": (0, 2), "bias": False}),
    (2, {"stride": 3, "padding": (0, 1), "output_padding": (1, 0)}),
    (3, {"stride": (1, 2, 3), "padding": 1, "output_padding": (0, 1, 2)}),
    (3, {"stride": 2, "padding": 1, "output_padding": 1}),
    (3, {"stride": 2, "padding": 1}),
]


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize(("rank", "form"), FORMS)
def test_the_output_is_as_large_as_that_of_torch(rank: int, form: dict[str, Any], frontend: str) -> None:
    torch.manual_seed(3)
    layer = getattr(torch.nn, f"ConvTranspose{rank}d")(4, 6, 3, **form).eval().requires_grad_(False)
    check(layer, torch.randn(2, 4, *(5, 4, 3)[:rank]), frontend=frontend)
