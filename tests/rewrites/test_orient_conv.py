"""ANE602: height and width of a region of convs swapped, against PyTorch, and by chip."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, converted_as, kinds, only_output, unsupported_ops

NAME = "orient_conv"

rule = partial(configure_rewrite, NAME)


class Keywords(nn.Module):
    """A keyword spotter of temporal convs, its time axis laid on the height, as many are written for Conv2d."""

    def __init__(self, bands=40, channels=(64, 64), kernel=3):
        super().__init__()
        self.first = nn.Conv2d(bands, channels[0], (3, 1), padding=(1, 0))
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv2d(a, b, (kernel, 1), padding=(kernel // 2, 0)), nn.BatchNorm2d(b), nn.ReLU(),
            nn.Conv2d(b, b, (kernel, 1), padding=(kernel // 2, 0)), nn.BatchNorm2d(b),
        ) for a, b in zip(channels, channels[1:]))
        self.pool = nn.MaxPool2d((2, 1))
        self.head = nn.Linear(channels[-1], 12)

    def forward(self, x):
        x = torch.relu(self.first(x.unsqueeze(-1)))
        for block in self.blocks:
            x = torch.relu(block(x) + x)
        return self.head(self.pool(x).mean((2, 3)))


class ChannelsLast(nn.Module):
    """Separable convs between two transposes."""

    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(8, 8, (1, 20), padding=(0, 10)), nn.ReLU(), nn.Conv2d(8, 8, (3, 1)))

    def forward(self, x):
        return self.convs(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize(("module", "shape", "chip"), [(Keywords, (1, 40, 98), "m6"), (Keywords, (1, 40, 98), "m4"),
                                                       (ChannelsLast, (1, 40, 64, 8), "m4")])
def test_models(module, shape, chip, way, tmp_path):
    torch.manual_seed(0)
    layer, x = module().eval(), torch.randn(shape)
    held = converted_as(layer, x, way, tmp_path / "m.mlpackage")
    (name,) = held.functions["main"].inputs
    values = x.numpy().astype(np.float16).astype(np.float32)
    before = {precision: only_output(held, values, precision) for precision in ("float16", "float64")}
    counts, refused = count_ops(held), unsupported_ops(held, chip)
    assert apply_rewrite(rule(), held, target=chip).fired
    assert count_ops(held) == counts and list(held.functions["main"].inputs) == [name]
    if module is ChannelsLast:
        assert refused == ["conv"] and not unsupported_ops(held, chip)
    else:
        assert all(op.weight.shape[2:] in ((1, 3), (1, 1)) for _, op in iterate_ops(held) if op.op_type == "conv")
    for precision, value in before.items():
        np.testing.assert_array_equal(only_output(held, values, precision), value)
    assert not apply_rewrite(rule(), held, target=chip).fired


def count_ops(program):
    return {name: count for name, count in kinds(program).items() if name != "const"}


def chain(kernel, height, width, channels=256, layers=3, at=None):
    """Convs with `kernel` on a map of `height` x `width` between transposes (or with a dummy axis)."""
    def body(x):
        value = mb.transpose(x=x, perm=[0, 3, 1, 2])
        for _ in range(layers):
            value = mb.conv(x=value, weight=np.zeros((channels, channels, *kernel), np.float16), pad_type="same")
        return mb.transpose(x=value, perm=[0, 2, 3, 1], name="y")

    return build_program(body, x=(1, height, width, channels))


@pytest.mark.parametrize(("kernel", "height", "width", "chip", "fires"), [
    ((3, 1), 32, 32, "m6", True),  # 1x3 is 1.53 times faster
    ((1, 3), 32, 32, "m6", False),
    ((3, 1), 32, 32, "m4", False),  # nobody measured
    ((1, 9), 32, 8, "m6", True),  # 2.15 times faster as 9x1 on 8x32
    ((1, 9), 8, 128, "m6", False),  # 13 % slower as 9x1 on 128x8
    ((9, 1), 8, 32, "m6", False),
    ((1, 9), 32, 8, "m4", True),  # not measured, but rows of 8 are padded to 32
    ((1, 9), 32, 32, "m4", False),
    ((1, 16), 32, 32, "m4", True),  # unsupported
    ((1, 32), 64, 64, "m4", False),  # unsupported either way
])
def test_by_what_was_measured(kernel, height, width, chip, fires):
    assert bool(find_matches(rule(), chain(kernel, height, width), target=chip).fired) == fires


@pytest.mark.law
@given(st.integers(1, 5), st.integers(1, 2), st.integers(1, 2), st.integers(0, 3), st.sampled_from([1, 2]),
       st.integers(0, 2**31))
def test_same_bits(kernel, stride, dilation, padding, groups, seed):
    random = np.random.default_rng(seed)
    weight = random.uniform(-1, 1, (600, 4 // groups, kernel, 1)).astype(np.float16)

    def body(x):
        value = mb.conv(x=mb.expand_dims(x=x, axes=[3]), weight=weight, groups=groups, strides=[stride, 1],
                        pad_type="custom", pad=[padding, 2, 0, 0], dilations=[dilation, 1])
        value = mb.add(x=mb.tanh(x=value), y=make_weight(1, 600, 1, 1))
        return [mb.reduce_mean(x=value, axes=[2, 3], keep_dims=False, name="a"), mb.reshape(
            x=value, shape=[1, -1], name="b")]

    held = build_program(body, x=(1, 4, 40))
    x = random.standard_normal((1, 4, 40)).astype(np.float16)
    before = [Runtime(held, precision=each)({"x": x}) for each in ("float16", "float64")]
    assert bool(apply_rewrite(rule(), held).fired) == (kernel > 1)
    for precision, old in zip(("float16", "float64"), before):
        for name, value in Runtime(held, precision=precision)({"x": x}).items():
            np.testing.assert_array_equal(value, old[name])


def near(body, **settings):
    held = build_program(body, x=(1, 4, 40), **settings)
    return [miss.reason for miss in find_matches(rule(), held).near_misses]


def upright(x):
    return mb.conv(x=mb.expand_dims(x=x, axes=[-1]), weight=make_weight(600, 4, 3, 1), name="c")


@pytest.mark.parametrize(("body", "reason"), [
    (lambda x: upright(x), "'c' is returned: it would need a transpose"),
    (lambda x: mb.squeeze(x=mb.softmax(x=upright(x), axis=1), axes=[-1]),
     "softmax reads a value directly: it would need a transpose"),
    (lambda x: mb.squeeze(x=mb.add(x=upright(x), y=make_weight(38, 2)), axes=[0]),
     "add reads a value directly: it would need a transpose"),
    (lambda x: mb.squeeze(x=mb.conv_transpose(x=upright(x), weight=make_weight(600, 2, 3, 1), bias=make_weight(2)),
                          axes=[-1]), "conv_transpose reads a value directly: it would need a transpose"),
    (lambda x: mb.squeeze(x=mb.conv(x=mb.reshape(x=x, shape=[1, 4, 40, 1], name="r"),
                                    weight=make_weight(600, 4, 3, 1)), axes=[-1]),
     "'r' comes directly from reshape: it would need a transpose"),
])
def test_left_alone(body, reason):
    assert near(body, opset=ct.target.iOS17) == [reason]


def test_a_lifted_conv_takes_the_axis_that_is_faster():
    """lift_conv_1d chooses by the same facts: the width, unless the kernel is too wide there."""
    for kernel, shape in ((5, (1, 5)), (13, (1, 13)), (14, (14, 1)), (20, (20, 1))):
        held = build_program(lambda x, k=kernel: mb.conv(x=x, weight=make_weight(6, 4, k), pad_type="same"),
                             x=(1, 4, 40))
        assert apply_rewrite(configure_rewrite("lift_conv_1d", always=True), held).fired
        (conv,) = (op for _, op in iterate_ops(held) if op.op_type == "conv")
        assert conv.weight.shape[2:] == shape
        assert not apply_rewrite(rule(), held).fired


def test_compressed_weights_stay_so():
    def body(x):
        weight = mb.constexpr_affine_dequantize(quantized_data=np.ones((600, 4, 3, 1), np.int8), zero_point=np.int8(0),
                                                scale=np.float16(0.5), axis=0)
        return mb.squeeze(x=mb.conv(x=mb.expand_dims(x=x, axes=[-1]), weight=weight), axes=[-1], name="y")

    held = build_program(body, x=(1, 4, 40))
    x = np.random.default_rng(0).standard_normal((1, 4, 40)).astype(np.float16)
    before = only_output(held, x, "float16")
    assert apply_rewrite(rule(), held).fired and kinds(held)["constexpr_affine_dequantize"] == 1
    np.testing.assert_array_equal(only_output(held, x, "float16"), before)


class UprightVocoder(nn.Module):
    """A generator like HiFi-GAN's, written with Conv2d and its time on the height."""

    def __init__(self, biased, channels=32):
        super().__init__()
        self.first = nn.Conv2d(20, channels, (7, 1), padding=(3, 0))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(channels >> i, channels >> i + 1, (8, 1), (4, 1), (2, 0),
                                                    bias=biased) for i in range(2))
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Conv2d(channels >> i + 1, channels >> i + 1, (kernel, 1), padding=(
            kernel // 2 * dilation, 0), dilation=(dilation, 1)) for kernel, dilation in ((3, 1), (7, 1), (5, 3)))
            for i in range(2))
        self.last = nn.Conv2d(channels >> 2, 1, (7, 1), padding=(3, 0))

    def forward(self, x):
        x = self.first(x.unsqueeze(-1))
        for up, block in zip(self.ups, self.blocks):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = sum(conv(nn.functional.leaky_relu(x, 0.1)) + x for conv in block)
        return torch.tanh(self.last(x)).squeeze(-1)


@pytest.mark.parametrize("biased", [False, True])
def test_a_vocoder_standing_upright(biased, tmp_path):
    """With biases its conv_transposes stay in the form that was verified, and so does the rest."""
    torch.manual_seed(0)
    layer, x = UprightVocoder(biased).eval(), torch.randn(1, 20, 40)
    held = converted_as(layer, x, "traced", tmp_path / "m.mlpackage")
    values = x.numpy().astype(np.float16).astype(np.float32)
    before, counts = only_output(held, values, "float16"), count_ops(held)
    trace = apply_rewrite(rule(), held, target="m4")
    assert bool(trace.fired) != biased
    if biased:
        assert any("it would need a transpose" in miss.reason for miss in trace.near_misses)
    else:
        assert count_ops(held) == counts
        assert not [op for _, op in iterate_ops(held) if op.op_type == "conv_transpose" and op.weight.shape[2] > 1]
    np.testing.assert_array_equal(only_output(held, values, "float16"), before)


def test_a_conv_front_in_one_dimension_is_core_mls_own_matter(tmp_path):
    """The front of wav2vec 2.0: convs of rank 3 are left as they are."""
    class Front(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.Sequential(nn.Conv1d(1, 16, 10, 5), nn.GELU(), nn.Conv1d(16, 16, 3, 2), nn.GELU())

        def forward(self, x):
            return self.convs(x)

    held = converted_as(Front().eval(), torch.randn(1, 1, 400), "traced", tmp_path / "m.mlpackage")
    trace = apply_rewrite(rule(), held, target="m6")
    assert not trace.fired and not trace.near_misses
