"""The two faults of transposed convolutions: each against the right result of torch, damaged by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

from tests.runtime.helpers import close, draw, run, same_bits
from tests.runtime.quirks.cases import deconvolved

BIAS, PAD, MAC = "conv_transpose_1d_bias", "asymmetric_conv_transpose_pad", "mac_overflow_32768"


def _layer(bias: bool) -> tuple[torch.nn.ConvTranspose1d, Any]:
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose1d(6, 4, 7, stride=3, padding=2, bias=bias)

    def build(x: Any, rank: int = 3) -> Any:
        options: dict[str, Any] = {"pad": [2, 2], "strides": [3], "pad_type": "custom"}
        weight = layer.weight.detach().numpy()
        if layer.bias is not None:
            options["bias"] = layer.bias.detach().numpy()
        if rank == 3:
            return mb.conv_transpose(x=x, weight=weight, **options)
        options |= {"pad": [2, 2, 0, 0], "strides": [3, 1]}
        return mb.squeeze(
            x=mb.conv_transpose(x=mb.expand_dims(x=x, axes=[-1]), weight=weight[..., None], **options), axes=[-1]
        )

    return layer, build


def test_the_bias_reaches_the_first_values_of_rank_3_only() -> None:
    layer, build = _layer(bias=True)
    x = draw(0, 1, 6, 20)
    right = layer(torch.from_numpy(x)).detach().numpy()
    assert layer.bias is not None
    faulty = right - layer.bias.detach().numpy()[None, :, None]
    faulty[:, :, :8] = right[:, :, :8]
    close(run(build, {"x": x})[0], right)
    close(run(build, {"x": x}, quirks=[BIAS])[0], faulty)
    close(run(lambda x: build(x, rank=4), {"x": x}, quirks=[BIAS])[0], right)


def test_without_a_bias_there_is_none_to_lose() -> None:
    layer, build = _layer(bias=False)
    x = draw(0, 1, 6, 20)
    close(run(build, {"x": x}, quirks=[BIAS])[0], layer(torch.from_numpy(x)).detach().numpy())


@pytest.mark.parametrize(("dtype", "shifted"), [(np.float16, True), (np.float32, False)])
@pytest.mark.parametrize("shape", [None, [1, 3, 8]])
def test_unequal_pads_change_places(dtype: Any, shifted: bool, shape: list[int] | None) -> None:
    x, weight = draw(0, 1, 2, 4, dtype=dtype), draw(1, 2, 3, 3, dtype=dtype)
    full = torch.nn.functional.conv_transpose1d(
        torch.from_numpy(x).double(), torch.from_numpy(weight).double(), stride=2
    ).numpy()

    def build(x: Any) -> Any:
        options = {"output_shape": shape} if shape else {}
        return mb.conv_transpose(x=x, weight=weight, pad_type="custom", pad=[1, 0], strides=[2], **options)

    close(run(build, {"x": x})[0], full[..., 1:])
    close(run(build, {"x": x}, quirks=[PAD])[0], full[..., :-1] if shifted else full[..., 1:])


def test_unequal_pads_of_each_axis_change_places() -> None:
    x, weight = draw(0, 1, 2, 4, 5, dtype=np.float16), draw(1, 2, 3, 4, 4, dtype=np.float16)
    full = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(x).double(), torch.from_numpy(weight).double()).numpy()

    def build(x: Any) -> Any:
        return mb.conv_transpose(x=x, weight=weight, pad_type="custom", pad=[1, 1, 2, 0])

    close(run(build, {"x": x}, quirks=[PAD])[0], full[:, :, 1:-1, :-2])


@pytest.mark.parametrize("names", itertools.permutations([BIAS, PAD, MAC]))
def test_all_three_add_up_in_any_order(names: tuple[str, ...]) -> None:
    build = deconvolved(bias=True, pad=(1, 0))
    weight = draw(7, 3, 2, 5, dtype=np.float16).astype(float)
    x = draw(3, 1, 3, 9, dtype=np.float16)
    x[0, :, 4] = [30000, 30000, -30000]
    full = torch.nn.functional.conv_transpose1d(
        torch.from_numpy(x).double(), torch.from_numpy(weight), stride=3).numpy()
    expected = full[..., :-1].copy()
    expected[..., :8] += np.array([3.0, -5.0])[None, :, None]
    # Each of the sums that take part of the large elements, in order.
    for channel, place in itertools.product(range(2), range(12, 17)):
        partial = np.cumsum(x[0, :, 4].astype(float) * weight[:, channel, place - 12])
        over = np.abs(partial) >= 32768
        if over.any():
            expected[0, channel, place] = np.sign(partial[over.argmax()]) * np.inf
    found = run(build, {"x": x}, quirks=names)[0]
    assert np.isinf(expected).any() and np.isfinite(expected[0, :, 12:17]).any()
    close(found, expected, 1e-9)


def test_a_bias_that_does_not_arrive_starts_no_sum() -> None:
    weight = np.ones((1, 1, 1), np.float16)
    x = np.full((1, 1, 12), 20000, np.float16)

    def build(x: Any) -> Any:
        return mb.conv_transpose(x=x, weight=weight, bias=np.array([20000], np.float16))

    assert np.isinf(run(build, {"x": x}, quirks=[MAC])[0]).all()
    found = run(build, {"x": x}, quirks=[MAC, BIAS])[0]
    np.testing.assert_array_equal(found, np.where(np.arange(12) < 8, np.inf, 20000.0)[None, None])


@pytest.mark.parametrize("names", [(BIAS,), (PAD,), (BIAS, PAD), (BIAS, PAD, MAC)])
def test_symmetric_pads_and_no_bias_are_untouched(names: tuple[str, ...]) -> None:
    x = draw(0, 1, 3, 9, dtype=np.float16)
    same_bits(run(deconvolved(pad=(1, 1)), {"x": x}, quirks=names)[0], run(deconvolved(pad=(1, 1)), {"x": x})[0])
