"""Op families against the torch functions of the same meaning."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from tests.runtime.helpers import Array, close, draw, run, same_bits

X = draw(0, 2, 4, 9, 8)


def t(array: Array) -> torch.Tensor:
    return torch.from_numpy(array).double()


def ours(build: Any, *arrays: Array, opset: Any = ct.target.iOS18) -> Array:
    names = ["x", "y", "z"][: len(arrays)]
    return run(build, dict(zip(names, arrays)), opset=opset)[0]


def test_silu() -> None:
    close(ours(lambda x: mb.silu(x=x), X), F.silu(t(X)))


def test_pow_of_integers() -> None:
    found = ours(lambda x: mb.pow(x=x, y=np.int32(3)), np.array([-2, 3], np.int32))
    np.testing.assert_array_equal(found, [-8, 27])


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize(("rank", "ceil_mode"), [(1, False), (2, False), (3, False), (1, True), (2, True)])
def test_avg_pool(rank: int, exclude: bool, ceil_mode: bool) -> None:
    x = draw(rank, 2, 3, *[9, 8, 7][:rank])
    sizes, strides, pads = [4, 3, 2][:rank], [3, 2, 2][:rank], [2, 1, 0][:rank]
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    expected = pool(t(x), sizes, strides, pads, ceil_mode=ceil_mode, count_include_pad=not exclude)

    def build(x: Any) -> Any:
        return mb.avg_pool(
            x=x, kernel_sizes=sizes, strides=strides, pad_type="custom", pad=[each for each in pads for _ in range(2)],
            ceil_mode=ceil_mode, exclude_padding_from_average=exclude,
        )  # fmt: skip

    close(ours(build, x), expected)


@pytest.mark.parametrize(("rank", "ceil_mode"), [(1, False), (2, False), (3, False), (1, True), (2, True)])
def test_max_pool(rank: int, ceil_mode: bool) -> None:
    x = draw(rank, 2, 3, *[9, 8, 7][:rank])
    sizes, strides, pads = [4, 3, 2][:rank], [3, 2, 2][:rank], [2, 1, 0][:rank]
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]

    def build(x: Any) -> Any:
        pad = [each for each in pads for _ in range(2)]
        return mb.max_pool(x=x, kernel_sizes=sizes, strides=strides, pad_type="custom", pad=pad, ceil_mode=ceil_mode)

    close(ours(build, x), pool(t(x), sizes, strides, pads, ceil_mode=ceil_mode))


@pytest.mark.parametrize(("pad_type", "pads"), [("same", (1, 2)), ("same_lower", (2, 1)), ("valid", (0, 0))])
def test_pool_pad_types(pad_type: str, pads: tuple[int, int]) -> None:
    x = draw(0, 1, 2, 7)
    padded = F.pad(t(x), pads)
    found = ours(lambda x: mb.avg_pool(x=x, kernel_sizes=[4], pad_type=pad_type), x)
    close(found, F.avg_pool1d(padded, 4, 1))
    found = ours(lambda x: mb.l2_pool(x=x, kernel_sizes=[4], pad_type=pad_type), x)
    close(found, F.lp_pool1d(padded, 2, 4, 1))


def test_norms() -> None:
    mean, variance, gamma, beta = draw(1, 4), np.abs(draw(2, 4)) + 0.1, draw(3, 4), draw(4, 4)
    options: dict[str, Any] = {"gamma": gamma, "beta": beta, "epsilon": 1e-3}
    expected = F.batch_norm(t(X), t(mean), t(variance), t(gamma), t(beta), eps=1e-3)
    close(ours(lambda x: mb.batch_norm(x=x, mean=mean, variance=variance, **options), X), expected)
    expected = F.instance_norm(t(X), weight=t(gamma), bias=t(beta), eps=1e-3)
    close(ours(lambda x: mb.instance_norm(x=x, **options), X), expected)
    close(
        ours(lambda x: mb.layer_norm(x=x, axes=[-2, -1], epsilon=1e-3), X), F.layer_norm(t(X), X.shape[-2:], eps=1e-3)
    )


def test_parameters_of_another_number_of_channels_are_rejected() -> None:
    """torch rejects them, too; coremltools accepts any."""
    one, four = draw(1, 1), np.abs(draw(2, 4)) + 0.1
    with pytest.raises(ane.InputError, match=r"batch_norm .*: mean has 4 values; expected 1, one for each channel"):
        ours(lambda x: mb.batch_norm(x=x, mean=four, variance=four), X[:, :1])
    with pytest.raises(ane.InputError, match=r"instance_norm .*: beta has 1 value; expected 4"):
        ours(lambda x: mb.instance_norm(x=x, gamma=four, beta=one), X)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_local_response_norm(size: int) -> None:
    found = ours(lambda x: mb.local_response_norm(x=x, size=size, alpha=0.01, beta=0.6, k=1.5), X)
    close(found, F.local_response_norm(t(X), size, alpha=0.01, beta=0.6, k=1.5))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis: int) -> None:
    close(ours(lambda x: mb.softmax(x=x, axis=axis), X), F.softmax(t(X), axis))


def test_moving_the_axis_of_a_softmax_or_sum_keeps_the_bits() -> None:
    for precision in ("float64", "float32"):
        for name, options in (("softmax", {"axis": 1}), ("reduce_sum", {"axes": [1], "keep_dims": True})):

            def moved(x: Any, name: str = name, options: Any = options) -> Any:
                options = {**options, next(iter(options)): [-1] if name == "reduce_sum" else -1}
                y = getattr(mb, name)(x=mb.transpose(x=x, perm=[0, 2, 3, 1]), **options)
                return mb.transpose(x=y, perm=[0, 3, 1, 2])

            def plain(x: Any, name: str = name, options: Any = options) -> Any:
                return getattr(mb, name)(x=x, **options)

            found, expected = (run(each, {"x": X}, precision=precision)[0] for each in (moved, plain))
            same_bits(found, expected)


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sin", "log", "sigmoid", "softplus"])
def test_a_value_has_the_same_image_wherever_it_stands(name: str) -> None:
    """Vector libraries must not let an element's place in memory change its result: rewrites only move things."""
    x = np.abs(draw(0, 67)) + 0.1
    for precision in ("float64", "float32"):
        whole = run(lambda x: getattr(mb, name)(x=x), {"x": x}, precision=precision)[0]
        for first, last in ((1, 67), (3, 12), (66, 67)):
            part = run(lambda x: getattr(mb, name)(x=x), {"x": x[first:last]}, precision=precision)[0]
            same_bits(part, whole[first:last])


def _gates(array: Array, order: list[int]) -> Array:
    return np.concatenate([np.split(array, len(order))[each] for each in order])


@pytest.mark.parametrize("sequence", [True, False])
def test_bidirectional_lstm(sequence: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.LSTM(3, 4, bidirectional=True)
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    x, h, c = draw(0, 5, 2, 3), draw(1, 2, 2, 4), draw(2, 2, 2, 4)
    output, (last_h, last_c) = layer(*(torch.from_numpy(x), (torch.from_numpy(h), torch.from_numpy(c))))
    order = [0, 1, 3, 2]  # torch: input, forget, cell, output

    def build(x: Any) -> Any:
        both = {
            f"{name}{ours}": _gates(p[f"{name}_l0{theirs}"], order)
            for name in ("weight_ih", "weight_hh")
            for ours, theirs in (("", ""), ("_back", "_reverse"))
        }
        bias = {
            f"bias{ours}": _gates(p[f"bias_ih_l0{theirs}"] + p[f"bias_hh_l0{theirs}"], order)
            for ours, theirs in (("", ""), ("_back", "_reverse"))
        }
        return mb.lstm(
            x=x, initial_h=np.concatenate(list(h), -1), initial_c=np.concatenate(list(c), -1), **both, **bias,
            direction="bidirectional", output_sequence=sequence,
        )  # fmt: skip

    expected = output if sequence else torch.cat([output[-1:, :, :4], output[:1, :, 4:]], -1)
    found = run(build, {"x": x}, precision="float32")
    for each, truth in zip(found, (expected, torch.cat(list(last_h), -1), torch.cat(list(last_c), -1))):
        close(each, truth.detach().numpy())


def test_gru_with_reset_after() -> None:
    torch.manual_seed(0)
    layer = torch.nn.GRU(3, 4)
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    x, h = draw(0, 5, 2, 3), draw(1, 1, 2, 4)
    output, last = layer(torch.from_numpy(x), torch.from_numpy(h))
    order = [0, 2, 1]  # torch: reset, update, new

    def build(x: Any) -> Any:
        return mb.gru(
            x=x, initial_h=h[0], weight_ih=_gates(p["weight_ih_l0"], order),
            weight_hh=_gates(p["weight_hh_l0"], order), input_bias=_gates(p["bias_ih_l0"], order),
            bias=_gates(p["bias_hh_l0"], order), reset_after=True, output_sequence=True,
        )  # fmt: skip

    found = run(build, {"x": x}, precision="float32")
    close(found[0], output.detach().numpy())
    close(found[1], last[0].detach().numpy())


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_rnn(direction: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.RNN(3, 4)
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    x, h = draw(0, 5, 2, 3), draw(1, 1, 2, 4)
    given = torch.from_numpy(x).flip(0) if direction == "reverse" else torch.from_numpy(x)
    output, last = layer(given, torch.from_numpy(h))

    def build(x: Any) -> Any:
        return mb.rnn(
            x=x, initial_h=h[0], weight_ih=p["weight_ih_l0"], weight_hh=p["weight_hh_l0"],
            bias=p["bias_ih_l0"] + p["bias_hh_l0"], output_sequence=True, direction=direction,
        )  # fmt: skip

    found = run(build, {"x": x}, precision="float32")
    close(found[0], output.detach().numpy())
    close(found[1], last[0].detach().numpy())


def test_upsampling() -> None:
    close(
        ours(lambda x: mb.upsample_nearest_neighbor(x=x, scale_factor_height=3, scale_factor_width=2), X),
        F.interpolate(t(X), scale_factor=(3, 2)),
    )
    for align in (True, False):

        def build(x: Any, align: bool = align) -> Any:
            return mb.upsample_bilinear(x=x, scale_factor_height=2.5, scale_factor_width=3.0, align_corners=align)

        expected = F.interpolate(
            t(X), scale_factor=(2.5, 3.0), mode="bilinear", align_corners=align, recompute_scale_factor=True
        )
        close(ours(build, X), expected)
    resized = ours(
        lambda x: mb.resize_bilinear(x=x, target_size_height=5, target_size_width=13, sampling_mode="UNALIGN_CORNERS"),
        X,
    )
    close(resized, F.interpolate(t(X), (5, 13), mode="bilinear", align_corners=False))


# torch reflects at the borders when corners are not aligned: MIL calls that symmetric, tested below
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize(
    ("padding", "align"),
    [("constant", True), ("constant", False), ("border", True), ("border", False), ("reflection", True)],
)
def test_resample(padding: str, mode: str, align: bool) -> None:
    points = (draw(1, 2, 5, 6, 2) * 0.8).astype(np.float32)
    found = ours(
        lambda x, y: mb.resample(
            x=x, coordinates=y, sampling_mode=mode, padding_mode=padding, padding_value=0.0,
            coordinates_mode="normalized_minus_one_to_one", align_corners=align,
        ),
        X,
        points,
    )  # fmt: skip
    torch_padding = {"constant": "zeros"}.get(padding, padding)
    close(found, F.grid_sample(t(X), t(points), mode=mode, padding_mode=torch_padding, align_corners=align), 1e-4)


def test_resample_symmetric() -> None:
    points = (draw(1, 2, 5, 6, 2) * 0.8).astype(np.float32)
    found = ours(
        lambda x, y: mb.resample(
            x=x, coordinates=y, sampling_mode="bilinear", padding_mode="symmetric", padding_value=0.0,
            coordinates_mode="normalized_minus_one_to_one", align_corners=False,
        ),
        X,
        points,
    )  # fmt: skip
    close(found, F.grid_sample(t(X), t(points), padding_mode="reflection", align_corners=False), 1e-4)


def test_shuffles() -> None:
    x = draw(0, 2, 12, 4, 6)
    close(ours(lambda x: mb.pixel_shuffle(x=x, upscale_factor=2), x), F.pixel_shuffle(t(x), 2))
    close(ours(lambda x: mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(2)), x), F.pixel_unshuffle(t(x), 2))
    blocks = ours(lambda x: mb.space_to_depth(x=x, block_size=2), x)
    # the block offset comes first in the new channel, then the old channel
    np.testing.assert_array_equal(blocks[:, 12:24], x[:, :, ::2, 1::2])
    close(ours(lambda x: mb.depth_to_space(x=mb.space_to_depth(x=x, block_size=2), block_size=2), x), x)


def test_windows_and_crops() -> None:
    found = ours(lambda x: mb.sliding_windows(x=x, axis=2, size=3, stride=2), X)
    close(found, t(X).unfold(2, 3, 2).movedim(-1, 3))
    close(ours(lambda x: mb.crop(x=x, crop_height=[1, 2], crop_width=[0, 3]), X), X[:, :, 1:-2, :-3])


@pytest.mark.parametrize(("mode", "reduce"), [("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin")])
def test_scatter_along_axis(mode: str, reduce: str) -> None:
    indices = np.random.default_rng(0).integers(0, 4, (2, 6, 9, 8)).astype(np.int32)
    updates = draw(1, 2, 6, 9, 8)

    def build(x: Any, y: Any, z: Any) -> Any:
        return mb.scatter_along_axis(data=x, indices=y, updates=z, axis=1, mode=mode)

    found = ours(build, X, indices, updates)
    close(found, t(X).scatter_reduce(1, torch.from_numpy(indices).long(), t(updates), reduce))
