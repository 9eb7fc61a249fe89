"""Fault models: each against the right result of torch, damaged by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

from tests.runtime.helpers import close, draw, run


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


def test_conv_transpose_1d_bias() -> None:
    layer, build = _layer(bias=True)
    x = draw(0, 1, 6, 20)
    right = layer(torch.from_numpy(x)).detach().numpy()
    assert layer.bias is not None
    faulty = right - layer.bias.detach().numpy()[None, :, None]
    faulty[:, :, :8] = right[:, :, :8]
    name = "conv_transpose_1d_bias"
    close(run(build, {"x": x})[0], right)
    close(run(build, {"x": x}, quirks=[name])[0], faulty)
    close(run(lambda x: build(x, rank=4), {"x": x}, quirks=[name])[0], right)


def test_conv_transpose_1d_bias_needs_a_bias() -> None:
    layer, build = _layer(bias=False)
    x = draw(0, 1, 6, 20)
    found = run(build, {"x": x}, quirks=["conv_transpose_1d_bias"])[0]
    close(found, layer(torch.from_numpy(x)).detach().numpy())


@pytest.mark.parametrize(("dtype", "shifted"), [(np.float16, True), (np.float32, False)])
def test_asymmetric_conv_transpose_pad(dtype: Any, shifted: bool) -> None:
    x, weight = draw(0, 1, 2, 4, dtype=dtype), draw(1, 2, 3, 3, dtype=dtype)
    full = torch.nn.functional.conv_transpose1d(
        torch.from_numpy(x).double(), torch.from_numpy(weight).double(), stride=2
    ).numpy()

    def build(x: Any) -> Any:
        return mb.conv_transpose(x=x, weight=weight, pad_type="custom", pad=[1, 0], strides=[2])

    close(run(build, {"x": x})[0], full[..., 1:])
    faulty = full[..., :-1] if shifted else full[..., 1:]
    close(run(build, {"x": x}, quirks=["asymmetric_conv_transpose_pad"])[0], faulty)


def test_mac_overflow_32768() -> None:
    x = np.array([[32767.0], [-32768.0], [1.0]], np.float32)
    weight = np.ones((1, 1), np.float32)

    def build(x: Any) -> Any:
        return mb.linear(x=x, weight=weight), mb.linear(x=x, weight=weight, bias=np.array([-40000.0], np.float32))

    plain, biased = run(build, {"x": x}, quirks=["mac_overflow_32768"])
    np.testing.assert_array_equal(plain, [[32767.0], [-np.inf], [1.0]])
    np.testing.assert_array_equal(biased, [[-np.inf]] * 3)
