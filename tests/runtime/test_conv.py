"""Convolutions against torch, and the canonical form that makes 1-D and lifted 2-D agree bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.helpers import Array, close, draw, run, same_bits

_CONV = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
_CONV_TRANSPOSE = (
    torch.nn.functional.conv_transpose1d,
    torch.nn.functional.conv_transpose2d,
    torch.nn.functional.conv_transpose3d,
)


def _torch(function: Any, x: Array, weight: Array, bias: Array | None, **options: Any) -> Array:
    tensors = [None if each is None else torch.from_numpy(each).double() for each in (x, weight, bias)]
    result: Array = function(*tensors, **options).numpy()
    return result


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_conv_custom_pad(rank: int, groups: int) -> None:
    x, weight, bias = draw(0, 2, 4, *[7, 6, 5][:rank]), draw(1, 6, 4 // groups, *[3, 2, 2][:rank]), draw(2, 6)
    options = {"strides": [2, 1, 1][:rank], "dilations": [1, 2, 1][:rank], "groups": groups}

    def build(x: Any) -> Any:
        pad = [2, 2, 1, 1, 0, 0][: 2 * rank]
        return mb.conv(x=x, weight=weight, bias=bias, pad_type="custom", pad=pad, **options)

    expected = _torch(
        _CONV[rank - 1], x, weight, bias, stride=options["strides"], dilation=options["dilations"], groups=groups,
        padding=[2, 1, 0][:rank],
    )  # fmt: skip
    close(run(build, {"x": x})[0], expected)


@pytest.mark.parametrize(("pad_type", "before", "after"), [("same", 1, 2), ("same_lower", 2, 1), ("valid", 0, 0)])
def test_conv_pad_types(pad_type: str, before: int, after: int) -> None:
    x, weight = draw(0, 1, 2, 8), draw(1, 3, 2, 4)
    padded = np.pad(x, ((0, 0), (0, 0), (before, after)))
    found = run(lambda x: mb.conv(x=x, weight=weight, pad_type=pad_type), {"x": x})[0]
    close(found, _torch(_CONV[0], padded, weight, None))


def test_conv_same_with_stride_has_the_documented_extent() -> None:
    x, weight = draw(0, 1, 2, 9, 10), draw(1, 3, 2, 3, 3)
    found = run(lambda x: mb.conv(x=x, weight=weight, pad_type="same", strides=[2, 3]), {"x": x})[0]
    # ceil(9 / 2), ceil(10 / 3); TensorFlow pads (1, 1) and (1, 1) here
    assert found.shape == (1, 3, 5, 4)
    close(found, _torch(_CONV[1], x, weight, None, stride=[2, 3], padding=[1, 1]))


def test_conv_with_weight_and_bias_fed_at_run_time() -> None:
    feeds = {"x": draw(0, 1, 2, 8), "weight": draw(1, 3, 2, 3), "bias": draw(2, 3)}
    found = run(lambda x, weight, bias: mb.conv(x=x, weight=weight, bias=bias), feeds)[0]
    close(found, _torch(_CONV[0], feeds["x"], feeds["weight"], feeds["bias"]))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_conv_transpose_with_output_padding(rank: int, groups: int) -> None:
    """torch's output padding is a declared output shape that is longer than the pads leave."""
    x, weight, bias = draw(0, 2, 4, *[5, 4, 3][:rank]), draw(1, 4, 6 // groups, *[4, 3, 2][:rank]), draw(2, 6)
    strides, pads = [3, 2, 2][:rank], [1, 1, 0][:rank]
    extra = [2, 1, 1][:rank]
    expected = _torch(
        _CONV_TRANSPOSE[rank - 1], x, weight, bias, stride=strides, padding=pads, groups=groups, output_padding=extra
    )

    def build(x: Any) -> Any:
        pad = [each for each in pads for _ in range(2)]
        return mb.conv_transpose(
            x=x, weight=weight, bias=bias, pad_type="custom", pad=pad, strides=strides, groups=groups,
            output_shape=expected.shape,
        )  # fmt: skip

    close(run(build, {"x": x})[0], expected)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize(("length", "taps", "stride", "dilation"), [(1, 7, 1, 1), (2, 16, 8, 1), (3, 16, 2, 3)])
def test_conv_transpose_of_a_batch_by_a_large_weight(
    batch: int, length: int, taps: int, stride: int, dilation: int
) -> None:
    """At float64, the whole batch is one matrix product."""
    x, weight, bias = draw(0, batch, 4, length), draw(1, 4, 24, taps), draw(2, 24)
    expected = _torch(
        _CONV_TRANSPOSE[0], x, weight, bias, stride=stride, dilation=dilation, padding=1)
    options: Any = {"pad_type": "custom", "pad": [1, 1], "strides": [stride], "dilations": [dilation]}
    found = run(lambda x: mb.conv_transpose(x=x, weight=weight, bias=bias, **options), {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_conv_transpose_same_and_asymmetric() -> None:
    x, weight = draw(0, 1, 2, 5), draw(1, 2, 3, 5)
    full = _torch(_CONV_TRANSPOSE[0], x, weight, None, stride=2)  # 13 long
    same = run(lambda x: mb.conv_transpose(x=x, weight=weight, pad_type="same", strides=[2]), {"x": x})[0]
    close(same, full[..., 1:11])
    options: Any = {"pad_type": "custom", "pad": [2, 1], "strides": [2]}
    close(run(lambda x: mb.conv_transpose(x=x, weight=weight, **options), {"x": x})[0], full[..., 2:12])


@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
@pytest.mark.parametrize("op", [mb.conv, mb.conv_transpose])
def test_a_zero_bias_is_no_bias(op: Any, precision: str) -> None:
    x, weight = -np.zeros((1, 2, 6), np.float32), draw(1, 2, 2, 3)
    bare = run(lambda x: op(x=x, weight=weight), {"x": x}, precision=precision)[0]
    zero = run(lambda x: op(x=x, weight=weight, bias=np.zeros(2, np.float32)), {"x": x}, precision=precision)[0]
    same_bits(bare, zero)
    assert not np.signbit(bare).any()


@st.composite
def _layers(draws: st.DrawFn) -> dict[str, Any]:
    """A 1-D (transposed) convolution that fits its input."""
    groups = draws(st.sampled_from([1, 2, 4]))
    size, dilation = draws(st.integers(1, 5)), draws(st.integers(1, 3))
    length = (size - 1) * dilation + draws(st.integers(1, 9))
    reach = (size - 1) * dilation
    layer = {
        "groups": groups,
        "channels": (groups * draws(st.integers(1, 3)), groups * draws(st.integers(1, 3))),
        "size": size,
        "dilation": dilation,
        "stride": draws(st.integers(1, 4)),
        "length": length,
        "pad": (draws(st.integers(0, reach)), draws(st.integers(0, reach))),
        "bias": draws(st.booleans()),
        "extra": draws(st.one_of(st.none(), st.integers(-1, 3))),
        "seed": draws(st.integers(0, 2**16)),
        "precision": draws(st.sampled_from(["float64", "float32", "float16"])),
        "dtype": draws(st.sampled_from([np.float16, np.float32])),
    }
    return layer


def _one_axis(layer: dict[str, Any], op: Any, weight_shape: tuple[int, ...], axis: int | None) -> Array:
    """The layer in 1-D (`axis` None) or lifted to 2-D with a dummy axis at 2 or 3, squeezed again."""
    x = draw(layer["seed"], 2, layer["channels"][0], layer["length"], dtype=layer["dtype"])
    weight = draw(layer["seed"] + 1, *weight_shape, dtype=layer["dtype"])
    bias = draw(layer["seed"] + 2, layer["channels"][1], dtype=layer["dtype"]) if layer["bias"] else None

    def spread(value: Any, neutral: Any) -> list[Any]:
        return [value] if axis is None else [neutral, value] if axis == 2 else [value, neutral]

    options: dict[str, Any] = {
        "strides": spread(layer["stride"], 1),
        "dilations": spread(layer["dilation"], 1),
        "pad": [amount for pair in spread(layer["pad"], (0, 0)) for amount in pair],
        "pad_type": "custom",
        "groups": layer["groups"],
    }
    if op is mb.conv_transpose and layer["extra"] is not None:
        reach = (layer["size"] - 1) * layer["dilation"] + 1
        natural = (layer["length"] - 1) * layer["stride"] + reach - sum(layer["pad"])
        options["output_shape"] = [2, layer["channels"][1], *spread(max(natural + layer["extra"], 1), 1)]

    def build(x: Any) -> Any:
        if axis is None:
            return op(x=x, weight=weight, bias=bias, **options)
        y = op(x=mb.expand_dims(x=x, axes=[axis]), weight=np.expand_dims(weight, axis), bias=bias, **options)
        return mb.squeeze(x=y, axes=[axis])

    return run(build, {"x": x}, precision=layer["precision"])[0]


@pytest.mark.law
@given(_layers())
def test_lifted_conv_has_the_same_bits(layer: dict[str, Any]) -> None:
    incoming, outgoing = layer["channels"]
    shape = (outgoing, incoming // layer["groups"], layer["size"])
    flat = _one_axis(layer, mb.conv, shape, None)
    same_bits(_one_axis(layer, mb.conv, shape, 2), flat)
    same_bits(_one_axis(layer, mb.conv, shape, 3), flat)
    same_bits(_one_axis(layer, mb.conv, shape, None), flat)


@pytest.mark.law
@given(_layers())
def test_lifted_conv_transpose_has_the_same_bits(layer: dict[str, Any]) -> None:
    incoming, outgoing = layer["channels"]
    shape = (incoming, outgoing // layer["groups"], layer["size"])
    # A transposed convolution may be padded away entirely; keep at least one element.
    layer["pad"] = tuple(min(each, (layer["length"] - 1) * layer["stride"] // 2) for each in layer["pad"])
    flat = _one_axis(layer, mb.conv_transpose, shape, None)
    same_bits(_one_axis(layer, mb.conv_transpose, shape, 2), flat)
    same_bits(_one_axis(layer, mb.conv_transpose, shape, 3), flat)
    same_bits(_one_axis(layer, mb.conv_transpose, shape, None), flat)


def test_a_stride_that_steps_nowhere_does_not_pick_another_algorithm() -> None:
    """One thread, input and kernel of extent 1: a stride of 2 rounded otherwise than a stride of 1."""
    layer = {"groups": 1, "channels": (2, 2), "size": 1, "dilation": 1, "stride": 2, "length": 1, "pad": (0, 0),
             "bias": False, "extra": None, "precision": "float32", "dtype": np.float32}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in range(20):
            flat = _one_axis({**layer, "seed": seed}, mb.conv, (2, 2, 1), None)
            same_bits(_one_axis({**layer, "seed": seed}, mb.conv, (2, 2, 1), 3), flat)
    finally:
        torch.set_num_threads(threads)
