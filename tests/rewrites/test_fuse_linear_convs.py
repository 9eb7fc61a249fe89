"""ANE601: convs, linears and scales in a row as one, against PyTorch's own layers."""

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

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, converted_as, half, kinds, only_output, torch_outputs

NAME = "fuse_linear_convs"

rule = partial(configure_rewrite, NAME)


def reasons(program):
    return [miss.reason for miss in find_matches(rule(), program).near_misses]


class Encoder(nn.Module):
    """The end of the encoder of an autoencoder of Stable Diffusion, and the front of its decoder."""

    def __init__(self, channels=16):
        super().__init__()
        self.conv_out = nn.Conv2d(channels, 8, 3, padding=1)
        self.quant_conv = nn.Conv2d(8, 8, 1)
        self.post_quant_conv = nn.Conv2d(4, 4, 1)
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)

    def forward(self, x):
        moments = self.quant_conv(self.conv_out(torch.nn.functional.silu(x)))
        return self.conv_in(self.post_quant_conv(moments[:, :4]))


class Tdnn(nn.Module):
    """Two layers of a speaker embedding as ECAPA-TDNN spells them: conv, relu, batch norm, with reflected ends."""

    def __init__(self, channels=8):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(channels, channels, 5, padding=4, dilation=2, padding_mode="reflect")
                                   for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(2))
        self.last = nn.Conv1d(channels, channels, 1)
        self.embed, self.norm = nn.Linear(channels, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms):
            x = norm(torch.relu(conv(x)))
        return self.norm(self.embed(self.last(x).mean(-1)))


class Attention(nn.Module):
    """Self-attention of a Whisper encoder: the queries are scaled behind their linear layer."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        def split(value):
            return value.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        weights = torch.softmax(split(self.q(x) * self.scale) @ split(self.k(x)).transpose(2, 3), -1)
        return self.out((weights @ split(self.v(x))).transpose(1, 2).flatten(2))


class Patches(nn.Module):
    """A ViT's front with the normalization of pixels in the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.patches = nn.Conv2d(3, 12, 4, stride=4)

    def forward(self, x):
        return self.patches((x - self.mean) / self.std).flatten(2).transpose(1, 2)


def randomize_norms(module):
    for each in module.modules():
        if isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for tensor, (low, high) in ((each.running_mean, (-1, 1)), (each.running_var, (0.5, 2)),
                                        (each.weight.data, (0.5, 2)), (each.bias.data, (-1, 1))):
                tensor.uniform_(low, high)
    return module


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize(("module", "shape", "before", "after"), [
    (Encoder, (1, 16, 8, 8), {"conv": 4}, {"conv": 3}),
    (Tdnn, (1, 8, 20), {"conv": 3, "batch_norm": 3}, {"conv": 3, "batch_norm": 0}),
    (Attention, (1, 10, 32), {"mul": 1}, {"mul": 0}),
    (Patches, (1, 3, 16, 16), {"sub": 1}, {"sub": 0, "mul": 0, "real_div": 0}),
])
def test_layers_of_models(module, shape, before, after, way, tmp_path):
    torch.manual_seed(0)
    layer, x = half(randomize_norms(module()).eval()), torch.rand(shape)
    held = converted_as(layer, x, way, tmp_path / "m.mlpackage")
    assert {name: kinds(held)[name] for name in before} == before, "coremltools does it by itself now"
    true = torch_outputs(layer, x)
    (name,) = held.functions["main"].inputs
    old = only_output(held, x.numpy(), "float16")
    trace = apply_rewrite(rule(), held)
    assert trace.fired and {name: kinds(held)[name] for name in after} == after
    assert list(held.functions["main"].inputs) == [name] and not apply_rewrite(rule(), held).fired
    scale = np.abs(true).max()
    assert np.abs(only_output(held, x.numpy(), "float64") - true).max() <= 2e-3 * scale
    error = np.abs(only_output(held, x.numpy(), "float16") - true).max()
    assert error <= 2 * np.abs(old - true).max() + 2e-3 * scale


@pytest.mark.law
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans(),
       st.booleans(), st.integers(0, 2**31))
def test_two_convs_are_pytorchs_two_convs(groups, inner, middle, kernel, stride, first, biased, seed):
    random = np.random.default_rng(seed)
    shapes = [(middle * groups, inner, *((1, 1) if first else (kernel, 2))),
              (groups, middle, *((kernel, 2) if first else (1, 1)))]
    values = [random.uniform(-1, 1, shape).astype(np.float16) for shape in shapes]
    biases = [random.uniform(-1, 1, shape[0]).astype(np.float16) if biased else None for shape in shapes]
    steps = [1, stride] if first else [stride, 1]

    def body(x):
        for weight, bias, step, name in zip(values, biases, steps, ("between", "y")):
            x = mb.conv(x=x, weight=weight, strides=[step, step], groups=groups, name=name,
                        **({} if bias is None else {"bias": bias}))
        return x

    held = build_program(body, x=(2, inner * groups, 7, 6))
    x = random.uniform(-1, 1, (2, inner * groups, 7, 6)).astype(np.float16)
    true = torch.from_numpy(x.astype(np.float64))
    for weight, bias, step in zip(values, biases, steps):
        true = torch.nn.functional.conv2d(true, torch.from_numpy(weight.astype(np.float64)), groups=groups, stride=step,
                                          bias=None if bias is None else torch.from_numpy(bias.astype(np.float64)))
    macs = [value.size for value in values]
    fused = groups * inner * kernel * 2
    fires = fused <= sum(macs)
    trace = apply_rewrite(rule(), held)
    assert bool(trace.fired) == fires or (fires and "times the MACs" in str(trace.near_misses))
    np.testing.assert_allclose(only_output(held, x, "float64"), true.numpy(), rtol=0,
                               atol=2**-9 * float(true.abs().max()) + 1e-9)


def two_layers(x, weight, scales):
    return [mb.mul(x=mb.linear(x=x, weight=weight), y=scale) for scale in scales]


def test_a_weight_with_two_readers_is_stored_once():
    weight, scale = make_weight(6, 4), make_weight(6) + np.float16(2)

    def body(x, same):
        held, factor = mb.const(val=weight, name="w"), mb.const(val=scale, name="s")
        other = factor if same else mb.const(val=scale * np.float16(0.75), name="s2")
        return two_layers(x, held, [factor, other])

    alike = build_program(lambda x: body(x, True), x=(2, 4))
    assert len(apply_rewrite(rule(), alike).fired) == 2
    assert len([op for _, op in iterate_ops(alike) if op.op_type == "const" and op.outputs[0].shape == (6, 4)]) == 1
    unlike = build_program(lambda x: body(x, False), x=(2, 4))
    assert reasons(unlike) == ["the weight 'w' has other users, so it would be stored twice"] * 2


@pytest.mark.parametrize(("body", "reason"), [
    (lambda x: [y := mb.linear(x=x, weight=make_weight(6, 4), name="l"), mb.mul(x=y, y=np.float16(0.3))],
     "the value between, 'l', has other users"),
    (lambda x: mb.mul(x=mb.linear(x=x, weight=mb.constexpr_affine_dequantize(
        quantized_data=np.ones((6, 4), np.int8), zero_point=np.int8(0), scale=np.float16(1), axis=0)),
        y=np.float16(0.3)), "the weight is compressed by constexpr_affine_dequantize: it would have to be "
                            "decompressed"),
    (lambda x: mb.mul(x=mb.linear(x=x, weight=make_weight(6, 4)), y=np.float16(6e-6)),
     "the largest weight of a channel would be 3.01e-06, and fp16 loses precision below 6.1e-05"),
])
def test_left_alone(body, reason):
    assert reason in reasons(build_program(body, x=(2, 4)))


@pytest.mark.parametrize("body", [
    lambda x: mb.mul(x=mb.linear(x=x, weight=make_weight(6, 4)), y=make_weight(2, 1) + np.float16(2)),  # of rows
    lambda x: mb.real_div(x=np.float16(3), y=mb.linear(x=x, weight=make_weight(6, 4))),
    lambda x: mb.add(x=mb.linear(x=x, weight=make_weight(1, 4)), y=make_weight(6)),  # makes it wider
    lambda x: mb.relu(x=mb.linear(x=x, weight=make_weight(6, 4))),
])
def test_is_no_scale_of_channels(body):
    held = build_program(body, x=(2, 4))
    assert not apply_rewrite(rule(), held).fired and not reasons(held)


def test_an_exact_scale_moves_nothing():
    held = build_program(lambda x: mb.mul(x=mb.linear(x=x, weight=make_weight(6, 4)), y=np.float16(0.25), name="y"),
                         x=(2, 4))
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float16)
    before = only_output(held, x, "float64")
    assert apply_rewrite(rule(), held).fired and kinds(held)["mul"] == 0
    np.testing.assert_array_equal(only_output(held, x, "float64"), before)


def test_with_the_passes_of_preset_full(tmp_path):
    """In the run of a preset, checked and guarded; what ane::bounded_accumulation builds is kept by a second run."""
    torch.manual_seed(1)
    layer = half(Encoder().eval())
    held = ct.convert(torch.jit.trace(layer, torch.zeros(1, 16, 8, 8)), convert_to="mlprogram", skip_model_load=True,
                      inputs=[ct.TensorType(name="x", shape=(1, 16, 8, 8))],
                      minimum_deployment_target=ct.target.iOS17)
    held.save(str(tmp_path / "a.mlpackage"))
    report = ane.rewrite(tmp_path / "a.mlpackage", tmp_path / "b.mlpackage", preset="full", target="m4")
    assert [trace.rule for trace in report.traces if trace.fired] == [NAME]
    assert all(each.passed for each in report.equivalence.outputs) if hasattr(report, "equivalence") else True
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 16, 8, 8)).astype(np.float32)}
    programs = [ane.load(tmp_path / name).program for name in ("a.mlpackage", "b.mlpackage")]
    old, new = (Runtime(each, precision="float64")(feeds) for each in programs)
    assert list(old) == list(new)
    for name in old:
        np.testing.assert_allclose(new[name], old[name], rtol=0, atol=2e-3 * np.abs(old[name]).max())


def test_a_weight_that_functions_share():
    """Each function has its own constants; both are fused, and stored once again."""
    def body(x):
        held = mb.const(val=make_weight(6, 4), name="w")
        return mb.mul(x=mb.linear(x=x, weight=held), y=make_weight(6) + np.float16(2), name="y")

    program = build_program(body, x=(2, 4))
    program.add_function("other", build_program(body, x=(3, 4)).functions["main"])
    assert len(apply_rewrite(rule(), program).fired) == 2 and not kinds(program)["mul"]
    values = [op.outputs[0].val for _, op in iterate_ops(program)
              if op.op_type == "const" and op.outputs[0].shape == (6, 4)]
    assert len(values) == 2 and np.array_equal(*values)


def test_the_two_ops_in_different_blocks_are_left():
    def body(x):
        made = mb.linear(x=x, weight=make_weight(6, 4))
        return mb.cond(pred=mb.squeeze(x=mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=np.float16(
            0))), _true_fn=lambda: mb.mul(x=made, y=np.float16(0.3)), _false_fn=lambda: mb.relu(x=made))

    held = build_program(body, x=(2, 4))
    assert not apply_rewrite(rule(), held).fired
    assert "the two ops are in different blocks" in reasons(held)


def test_large_weights_are_not_composed_to_find_out():
    """A lint of a program whose weights are placeholders of any size reads none of them."""
    large = np.broadcast_to(np.float16(0.5), (1 << 15, 1 << 15))
    held = build_program(lambda x: mb.linear(x=mb.linear(x=x, weight=large), weight=large, name="y"), x=(1, 1 << 15))
    assert reasons(held) == ["composing both weights takes 3.5e+13 multiplications, above 8.6e+09"]


def rounding_errors(draws, second):
    """Errors at float16 before and after two steps become one, as shares of the largest result, over `draws`."""
    found = []
    for seed in range(draws):
        random = np.random.default_rng(seed)
        weight = (random.standard_normal((96, 64)) / 8).astype(np.float16)
        held = build_program(lambda x: second(random, mb.linear(x=x, weight=weight)), x=(32, 64))
        x = random.standard_normal((32, 64)).astype(np.float16)
        true = only_output(held, x, "float64")
        before = only_output(held, x, "float16")
        assert apply_rewrite(rule(), held).fired
        found.append([np.sqrt(np.mean((each - true) ** 2)) / np.abs(true).max()
                      for each in (before, only_output(held, x, "float16"))])
    return np.exp(np.mean(np.log(found), axis=0))


@pytest.mark.parametrize("second", [
    lambda random, x: mb.mul(x=x, y=(1 + random.standard_normal(96) / 4).astype(np.float16), name="y"),
    lambda random, x: mb.linear(x=x, weight=(random.standard_normal((24, 96)) / 10).astype(np.float16), name="y"),
], ids=["a scale", "a linear"])
def test_one_step_rounds_no_more_than_two(second):
    """On the mean over draws; a single one is no measure, as errors of either form vary by a factor of ten."""
    before, after = rounding_errors(12, second)
    assert after <= 1.1 * before


def test_what_rounds_more_than_the_value_between_is_left():
    """The bound of two steps is |A| |B|, which is above 2^-14 here; A B is not, as its terms cancel."""
    random = np.random.default_rng(3)
    inner = random.standard_normal((64, 64)).astype(np.float16)
    inner[32:] = -inner[:32]  # A = [a, a] takes the sums of what cancels
    outer = np.float16(np.tile(random.standard_normal((24, 32)), 2) / 4)
    inner[0] += np.float16(1)

    def body(x):
        return mb.linear(x=mb.linear(x=x, weight=inner), weight=outer, name="y")

    cancelled = build_program(body, x=(2, 64))
    trace = apply_rewrite(rule(), cancelled)
    assert trace.fired, [miss.reason for miss in trace.near_misses]
    inner = np.float16(inner / 1000)
    inner[:, 0] = 0.04
    small = build_program(lambda x: mb.linear(x=mb.linear(x=x, weight=inner), weight=np.float16(np.eye(64) / 500),
                                              name="y"), x=(2, 64))
    (reason,) = reasons(small)
    assert "rounding the new weights would move results by up to" in reason
