"""Masks of minus infinity, read as finite numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

from tests.runtime.helpers import close, draw, run
from tests.runtime.quirks.cases import PRECISIONS

INF, NAME = np.inf, ["infinite_mask"]


def _softmax(x: Any) -> Any:
    return mb.softmax(x=x, axis=-1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_masked_throughout_is_uniform(precision: str) -> None:
    x = np.array([[-INF] * 4, [1, -INF, 2, -INF]], np.float16)
    right = run(_softmax, {"x": x}, precision=precision)[0]
    found = run(_softmax, {"x": x}, precision=precision, quirks=NAME)[0]
    assert np.isnan(right[0]).all()
    np.testing.assert_array_equal(found[0], 0.25)
    np.testing.assert_array_equal(found[1], right[1])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("row", "expected"), [
    ([INF, 5, INF, 5], [0.5, 0, 0.5, 0]),
    ([np.nan, 65504, INF, 0], [1, 0, 0, 0]),
    ([0, -60000, -INF, -INF], [1, 0, 0, 0]),
    ([-np.nan, -INF, -INF, -INF], [1, 0, 0, 0]),
])
def test_infinities_and_nan_are_large_numbers(precision: str, row: list[float], expected: list[float]) -> None:
    found = run(_softmax, {"x": np.array([row], np.float16)}, precision=precision, quirks=NAME)[0]
    close(found, [expected], 1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_finite_masks_are_right(precision: str) -> None:
    x = np.array([[1, -40000, 2, -10000], [-40000] * 4], np.float16)
    right = torch.softmax(torch.from_numpy(x).double(), -1).numpy()
    close(run(_softmax, {"x": x}, precision=precision, quirks=NAME)[0], right, 1e-3)


def test_a_value_outside_fp16_is_infinite_in_every_precision() -> None:
    def build(x: Any) -> Any:
        return mb.softmax(x=mb.mul(x=x, y=np.float16(2)), axis=-1)

    x = np.array([[-60000, -50000, -60000, -50000]], np.float16)
    for precision in PRECISIONS:
        np.testing.assert_array_equal(run(build, {"x": x}, precision=precision, quirks=NAME)[0], 0.25)
    assert run(build, {"x": x})[0][0, 0] == 0.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_with_a_row_masked_throughout_takes_the_mean(precision: str) -> None:
    query, key, value = (draw(seed, 1, 2, 3, 4, dtype=np.float16) for seed in range(3))
    mask = np.array([[0, 0, 0], [-INF, 0, -INF], [-INF, -INF, -INF]], np.float16)

    def build(query: Any, key: Any, value: Any) -> Any:
        return mb.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask)

    feeds = {"query": query, "key": key, "value": value}
    found = run(build, feeds, precision=precision, quirks=NAME)[0]
    wide = [torch.from_numpy(each).double() for each in (query, key, value)]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=torch.from_numpy(mask).double()).numpy()
    tolerance = 2e-3 if precision == "float16" else 1e-5
    close(found[:, :, :2], right[:, :, :2], tolerance)
    close(found[:, :, 2], value.astype(float).mean(2), tolerance)


def test_attention_with_a_bool_mask_is_untouched() -> None:
    query, key, value = (draw(seed, 1, 2, 3, 4, dtype=np.float16) for seed in range(3))

    def build(query: Any, key: Any, value: Any) -> Any:
        return mb.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=np.eye(3, dtype=bool))

    feeds = {"query": query, "key": key, "value": value}
    np.testing.assert_array_equal(run(build, feeds, quirks=NAME)[0], run(build, feeds)[0])


def test_it_adds_up_with_lost_probabilities() -> None:
    x = np.array([[-INF] * 2 + [0, 0], [-INF] * 4, [0, -9.8, -INF, -INF]], np.float16)

    def build(x: Any) -> Any:
        return mb.log(x=mb.softmax(x=x, axis=-1))

    found = run(build, {"x": x}, quirks=["log_softmax_underflow", *NAME])[0]
    half = np.log(0.5)
    close(found[:2], [[-INF, -INF, half, half], [np.log(0.25)] * 4], 1e-9)
    assert np.isneginf(found[2, 1:]).all()
