"""ANE239 against PyTorch, and beside coremltools' pass that undoes such lifts."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds, layout_ops


@pytest.mark.law
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.sampled_from([1, 2]),
       st.sampled_from([-1, 2]), st.booleans())
def test_is_pytorchs_conv_1d(kernel, stride, dilation, padding, groups, axis, flexible):
    torch.manual_seed(0)
    layer = torch.nn.Conv1d(2 * groups, 3 * groups, kernel, stride, padding, dilation, groups)
    built = build_program(
        lambda x: mb.conv(x=x, weight=layer.weight.detach().numpy(), bias=layer.bias.detach().numpy(),
                          strides=[stride], pad_type="custom", pad=[padding, padding], dilations=[dilation],
                          groups=groups, name="y"),
        dtype=types.fp32, x=(None, 2 * groups, None) if flexible else (2, 2 * groups, 16))
    assert apply_rewrite(find_rewrite("lift_conv_1d").configured(axis=axis, always=True), built).fired
    x = np.random.default_rng(0).standard_normal((2, 2 * groups, 16)).astype(np.float32)
    with torch.no_grad():
        expected = layer.double()(torch.from_numpy(x).double()).numpy()
    found = Runtime(built, precision="float64")({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("axis, undone", [(-1, False), (2, True)])
def test_compose_conv1d_undoes_only_the_other_axis(axis, undone):
    """What the page says of a second run of coremltools' default pipeline."""
    built = build_program(lambda x: mb.relu(x=mb.conv(x=x, weight=make_weight(4, 4, 3)), name="y"), x=(1, 4, 8))
    pipeline = ane.pipeline(passes="lift_conv_1d", options={"lift_conv_1d": {"axis": axis, "always": True}})
    PassPipelineManager.apply_pipeline(built, pipeline)
    assert [op.x.rank for op in built.functions["main"].find_ops(op_type="conv")] == [4]
    PassPipelineManager.apply_pipeline(built, ct.PassPipeline.DEFAULT)
    assert [op.x.rank for op in built.functions["main"].find_ops(op_type="conv")] == [3 if undone else 4]


def test_direct_neighbours_share_one_lift():
    def body(x):
        for _ in range(3):
            x = mb.conv(x=x, weight=make_weight(4, 4, 3))
        return mb.identity(x=x, name="y")

    built = build_program(body, x=(1, 4, 16))
    apply_rewrite(find_rewrite("lift_conv_1d").configured(always=True), built)
    assert layout_ops(built) == 2


def test_a_computed_weight_is_expanded_once_where_it_is_made():
    def body(x, w):
        made = mb.relu(x=w)
        return [mb.conv(x=x, weight=made, name="a"), mb.conv(x=mb.relu(x=x), weight=made, name="b")]

    built = build_program(body, x=(1, 4, 8), w=(4, 4, 3))
    apply_rewrite(find_rewrite("lift_conv_1d").configured(always=True), built)
    first, second = built.functions["main"].find_ops(op_type="conv")
    assert first.weight is second.weight and first.weight.op.op_type == "expand_dims"


@pytest.mark.parametrize(("kernel", "target", "lifted"), [
    (3, "m4", 0), (13, "m1", 0), (14, "m1", 1), (15, "m4", 0), (16, "m4", 1), (14, "all", 1)])
def test_only_what_the_target_does_not_support_is_lifted(kernel, target, lifted):
    """A lifted conv has rows of one element: 32 times the bytes of its buffers at fp16."""
    built = build_program(
        lambda x: mb.conv(x=x, weight=make_weight(4, 4, kernel), pad_type="same", name="y"), x=(1, 4, 3000)
    )
    assert len(apply_rewrite(find_rewrite("lift_conv_1d").configured(), built, target=target).fired) == lifted
    assert kinds(built)["expand_dims"] == lifted


def test_a_guard_counts_the_bytes_of_lifted_buffers():
    """An encoder that is on the ANE as a whole is not blown up, although the prediction has no price for it.

    By hand: a row of 3000 at fp16 is 6000 bytes, padded to 94 * 64 = 6016; 80 rows are 481,280, and a buffer is a
    multiple of 16 KiB: 30 * 16,384 = 491,520. Before there are four: x, conv, gelu and y. Each conv is lifted for
    itself, on the height by name; `orient_conv` lays it on the width again, where rows have 3000 elements: an
    expand_dims and a conv each make four more of the same size. (On the height they would be 32 times as large.)
    """
    def body(x):
        x = mb.gelu(x=mb.conv(x=x, weight=make_weight(80, 80, 3), pad_type="same"))
        return mb.conv(x=x, weight=make_weight(80, 80, 3), pad_type="same", name="y")

    built = build_program(body, x=(1, 80, 3000))
    assert ane.rewrite(built, preset="full", target="m4", verify=False).status == "unchanged"
    report = ane.rewrite(built, preset="full", target="m4", verify=False, options={
        "lift_conv_1d": {"always": True, "axis": -1}})
    assert report.status == "unchanged"
    flat = 30 * 16384
    assert f"{8 * flat / 1e6:.2f} {4 * flat / 1e6:.2f}" == "3.93 1.97"
    assert [trace.reverted for trace in report.reverted] == [
        "padded buffers of 3.93 MB instead of 1.97 MB (computed), without removing an unsupported op or a transition"]
