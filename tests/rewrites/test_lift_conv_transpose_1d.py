"""ANE301 against PyTorch: whatever the parameters, the lifted op computes ConvTranspose1d."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds, layout_ops

LIFT = "lift_conv_transpose_1d"


@st.composite
def layers(draw):
    groups = draw(st.sampled_from([1, 2]))
    kernel = draw(st.integers(1, 5))
    stride = draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 3))
    extra = draw(st.integers(0, max(stride, dilation) - 1))
    return {"in_channels": 2 * groups, "out_channels": groups * draw(st.integers(1, 3)), "kernel_size": kernel,
            "stride": stride, "dilation": dilation, "groups": groups, "output_padding": extra,
            "padding": draw(st.integers(0, (kernel - 1) * dilation // 2))}


def converted(layer, length, flexible):
    """The layer as coremltools spells it: output_padding is an output_shape, or a shorter trailing pad."""
    pads = [layer.padding[0], layer.padding[0] - layer.output_padding[0]]
    if pads[1] < 0:
        if flexible:
            return None
        pads[1] = 0
    size = (length - 1) * layer.stride[0] - 2 * layer.padding[0] + layer.dilation[0] * (layer.kernel_size[0] - 1) \
        + layer.output_padding[0] + 1
    shape = {} if flexible else {"output_shape": [2, layer.out_channels, size]}
    return build_program(
        lambda x: mb.conv_transpose(
            x=x, weight=layer.weight.detach().numpy(), bias=layer.bias.detach().numpy(), pad=pads, pad_type="custom",
            strides=list(layer.stride), dilations=list(layer.dilation), groups=layer.groups, name="y", **shape),
        dtype=types.fp32, x=(None, layer.in_channels, None) if flexible else (2, layer.in_channels, length))


@pytest.mark.law
@given(layers(), st.integers(1, 9), st.sampled_from([-1, 2]), st.booleans())
def test_is_pytorchs_conv_transpose_1d(parameters, length, axis, flexible):
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose1d(**parameters)
    built = converted(layer, length, flexible)
    if built is None or layer(torch.zeros(2, layer.in_channels, length)).shape[-1] < 1:
        return
    trace = apply_rewrite(find_rewrite(LIFT).configured(axis=axis), built)
    assert trace.fired
    assert kinds(built)["conv_transpose"] == 1 and layout_ops(built) == 2
    x = np.random.default_rng(0).standard_normal((2, layer.in_channels, length)).astype(np.float32)
    with torch.no_grad():
        expected = layer.double()(torch.from_numpy(x).double()).numpy()
    found = Runtime(built, precision="float64")({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(1.0, np.abs(expected).max()))


def test_direct_neighbours_share_one_lift():
    bias = np.array([0.5, -1.0, 0.25, 2.0], dtype=np.float16)

    def body(x):
        for number in range(4):
            x = mb.conv_transpose(x=x, weight=make_weight(4, 4, 3), bias=bias, name=f"y{number}")
        return x

    built = build_program(body, x=(1, 4, 8))
    for rule in (find_rewrite(LIFT).configured(), ):
        apply_rewrite(rule, built)
    assert layout_ops(built) == 2
    assert kinds(built)["conv_transpose"] == 4


def test_two_readers_of_one_value_share_one_expand_dims():
    bias = np.array([0.5, -1.0], dtype=np.float16)
    built = build_program(
        lambda x: [
            mb.conv_transpose(x=x, weight=make_weight(4, 2, 3), bias=bias, name="a"),
            mb.conv_transpose(x=x, weight=make_weight(4, 2, 5), bias=bias, name="b"),
        ],
        x=(1, 4, 8),
    )
    apply_rewrite(find_rewrite(LIFT).configured(), built)
    assert kinds(built)["expand_dims"] == 1 and kinds(built)["squeeze"] == 2


def test_a_shared_weight_stays_one_const():
    bias = np.array([0.5, -1.0, 0.25, 2.0], dtype=np.float16)

    def body(x):
        shared = mb.const(val=make_weight(4, 4, 3))
        return mb.conv_transpose(x=mb.relu(x=mb.conv_transpose(x=x, weight=shared, bias=bias)), weight=shared,
                                 bias=bias, name="y")

    built = build_program(body, x=(1, 4, 8))
    source = built.functions["main"].find_ops(op_type="conv_transpose")[0].weight.val
    apply_rewrite(find_rewrite(LIFT).configured(), built)
    first, second = built.functions["main"].find_ops(op_type="conv_transpose")
    assert first.weight is second.weight
    assert np.shares_memory(first.weight.val, source)


def test_a_zero_bias_goes_without_a_lift():
    built = build_program(
        lambda x: mb.conv_transpose(x=x, weight=make_weight(4, 2, 3), bias=np.zeros(2, np.float16), name="y"),
        x=(1, 4, 8),
    )
    (hit,) = apply_rewrite(find_rewrite(LIFT).configured(), built).fired
    assert hit.reason == "bias is all zero: dropped, no lift needed"
    assert layout_ops(built) == 0
    assert built.functions["main"].find_ops(op_type="conv_transpose")[0].bias is None


def test_the_note_has_the_cost_in_numbers():
    built = build_program(
        lambda x: mb.conv_transpose(x=x, weight=make_weight(768, 2, 7), bias=np.ones(2, np.float16), name="y"),
        x=(1, 768, 600),
    )
    (hit,) = apply_rewrite(find_rewrite(LIFT).configured(), built).fired
    assert "in 29.5 MB instead of 933.9 kB" in hit.reason


@pytest.mark.parametrize("again", ["default", "cleanup"])
def test_the_hosts_passes_do_not_undo_it(again):
    built = build_program(lambda x: mb.relu(x=mb.conv_transpose(
        x=x, weight=make_weight(4, 2, 3), bias=np.ones(2, np.float16)), name="y"), x=(1, 4, 8))
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    PassPipelineManager.apply_pipeline(built, ane.pipeline(passes=LIFT))
    PassPipelineManager.apply_pipeline(built, ct.PassPipeline.get_pipeline(again))
    assert [op.x.rank for op in built.functions["main"].find_ops(op_type="conv_transpose")] == [4]


def test_through_ct_convert_the_scopes_of_a_torch_model_are_kept():
    module = torch.nn.Sequential(torch.nn.ConvTranspose1d(4, 2, 3), torch.nn.ReLU()).eval()
    traced = torch.jit.trace(module, torch.zeros(1, 4, 8))
    model = ct.convert(traced, inputs=[ct.TensorType(shape=(1, 4, 8))], skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS17, pass_pipeline=ane.pipeline())
    lifted = model._mil_program.functions["main"].find_ops(op_type="conv_transpose")
    assert [op.x.rank for op in lifted] == [4]


def test_two_inputs_lifted_at_the_head_of_a_block():
    """The second value's expand_dims must not come to stand before the consts that it shares with the first."""
    bias = np.array([0.5, -1.0], dtype=np.float16)
    built = build_program(lambda x, g: mb.add(
        x=mb.conv_transpose(x=x, weight=make_weight(4, 2, 3), bias=bias),
        y=mb.conv_transpose(x=g, weight=make_weight(4, 2, 3), bias=bias), name="y"), x=(1, 4, 8), g=(1, 4, 8))
    apply_rewrite(find_rewrite(LIFT).configured(), built)
    built.validate()
    assert kinds(built)["expand_dims"] == 2


def test_two_outer_values_lifted_in_a_branch():
    bias = np.array([0.5, -1.0], dtype=np.float16)

    def body(x, g):
        total = mb.reduce_sum(x=mb.cast(x=x, dtype="fp32"), axes=[0, 1, 2], keep_dims=False)
        branch = lambda: mb.add(x=mb.conv_transpose(x=x, weight=make_weight(4, 2, 3), bias=bias),  # noqa: E731
                                y=mb.conv_transpose(x=g, weight=make_weight(4, 2, 3), bias=bias))
        return mb.cond(pred=mb.greater(x=total, y=np.float32(0)), _true_fn=branch, _false_fn=branch, name="y")

    built = build_program(body, x=(1, 4, 8), g=(1, 4, 8))
    assert len(apply_rewrite(find_rewrite(LIFT).configured(), built).fired) == 4
    built.validate()
