"""ANE304: a window said by pads alone, against PyTorch's full transposed convolution cut by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.rewrites.convolutions import WAYS, converted, distance, draw
from tests.rewrites.helpers import configure_rewrite, half, kinds

NAME = "explicit_conv_transpose_shape"


rule = partial(configure_rewrite, NAME)


def made(layer, shape, **parameters):
    half(layer)
    return build_program(
        lambda x: mb.conv_transpose(
            x=x, weight=layer.weight.detach().numpy().astype(np.float16),
            bias=layer.bias.detach().numpy().astype(np.float16), strides=list(layer.stride),
            dilations=list(layer.dilation), groups=layer.groups, name="y", **parameters), x=shape)


def cut(layer, x, windows):
    """The layer in double precision, without pads, from start to start + length on each spatial axis."""
    with torch.no_grad():
        full = layer.double()(torch.from_numpy(x).double()).numpy()
    layer.float()
    return full[(..., *(slice(start, start + length) for start, length in windows))]


def held(built, layer, shape, windows):
    """The program is that cut, and still is when every way but explicit pads is read wrong."""
    expected = cut(layer, draw(shape), windows)
    found = Runtime(built, precision="float64")({"x": draw(shape)})["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def says_all_by_pads(built):
    (op,) = [op for _, op in iterate_ops(built) if op.op_type == "conv_transpose"]
    flat = op.pad.val.reshape(-1, 2)
    shape = [(int(size) - 1) * step + (taps - 1) * spread + 1 - sum(pads) for size, step, taps, spread, pads in zip(
        op.x.shape[2:], op.strides.val, op.weight.shape[2:], op.dilations.val, flat.tolist())]
    return op.pad_type.val == "custom" and (flat[:, 0] == flat[:, 1]).all() \
        and list(op.outputs[0].shape[2:]) == shape


def test_the_published_program():
    """x (1, 3, 4, 4), kernel 3, output_shape (1, 3, 4, 4), no pad_type."""
    torch.manual_seed(0)
    layer, shape = torch.nn.ConvTranspose2d(3, 3, 3), (1, 3, 4, 4)
    built = made(layer, shape, output_shape=[1, 3, 4, 4])
    assert apply_rewrite(rule(), built).fired
    assert says_all_by_pads(built)
    held(built, layer, shape, [(0, 4), (0, 4)])


@pytest.mark.law
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 3),
       st.integers(1, 14))
def test_a_length_of_ones_own(kernel, stride, dilation, groups, pad, length):
    torch.manual_seed(0)
    layer, shape = torch.nn.ConvTranspose1d(4, 2, kernel, stride, groups=groups, dilation=dilation), (2, 4, 4)
    full = 3 * stride + (kernel - 1) * dilation + 1
    built = made(layer, shape, pad_type="custom", pad=[pad, 0], output_shape=[2, 2, length])
    fired = bool(apply_rewrite(rule(), built).fired)
    assert fired == (full - pad > length)
    if fired:
        assert says_all_by_pads(built)
        held(built, layer, shape, [(pad, length)])


@pytest.mark.parametrize("kind", ["same", "same_lower"])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(4, 2, 1), (3, 2, 1), (3, 3, 1), (2, 1, 3), (5, 2, 2)])
def test_same_is_the_middle_of_it(kernel, stride, dilation, kind):
    torch.manual_seed(0)
    layer, shape = torch.nn.ConvTranspose2d(2, 3, kernel, stride, dilation=dilation), (1, 2, 4, 5)
    rest = (kernel - 1) * dilation + 1 - stride
    start = rest // 2 if kind == "same" else rest - rest // 2
    sizes = [4 * stride, 5 * stride]
    given_shape = {"output_shape": [1, 3, *sizes]} if kind == "same_lower" else {}
    built = made(layer, shape, pad_type=kind, **given_shape)
    assert apply_rewrite(rule(), built).fired
    assert says_all_by_pads(built)
    assert kinds(built)["slice_by_index"] == rest % 2
    held(built, layer, shape, [(start, size) for size in sizes])


def test_same_of_symbolic_size():
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose1d(4, 2, 5, 2)
    built = made(layer, (None, 4, None), pad_type="same")
    assert apply_rewrite(rule(), built).fired
    for length in (1, 3, 6):
        held(built, layer, (2, 4, length), [(1, 2 * length)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
def test_the_shape_the_host_writes_is_left_alone(way, target, tmp_path):
    layer = torch.nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2)
    program_ = converted(layer, (1, 4, 5, 4), way, tmp_path, target=target)
    (op,) = [op for _, op in iterate_ops(program_) if op.op_type == "conv_transpose"]
    assert op.output_shape is not None
    assert not find_matches(rule(), program_).fired
    assert distance(program_, layer, (1, 4, 5, 4)) < 1e-12


@pytest.mark.parametrize("parameters", [
    {"pad_type": "custom", "pad": [2, 1], "output_shape": [2, 2, 9]}, {"pad_type": "same"},
    {"output_shape": [2, 2, 12]}, {"pad_type": "custom", "pad": [0, 2]},
])
def test_the_whole_pipeline_twice_is_once(parameters):
    torch.manual_seed(0)
    layer, shape = torch.nn.ConvTranspose1d(4, 2, 6, 3), (2, 4, 4)
    built = made(layer, shape, **parameters)
    before = Runtime(built, precision="float64")({"x": draw(shape)})["y"]
    PassPipelineManager.apply_pipeline(built, ane.pipeline())
    once = format_program(built)
    assert says_all_by_pads(built)
    faults = ["asymmetric_conv_transpose_pad", "conv_transpose_1d_bias"]
    found = Runtime(built, precision="float64", quirks=faults)({"x": draw(shape)})["y"]
    np.testing.assert_allclose(found, before, rtol=0, atol=1e-12)
    PassPipelineManager.apply_pipeline(built, ane.pipeline())
    assert format_program(built) == once
