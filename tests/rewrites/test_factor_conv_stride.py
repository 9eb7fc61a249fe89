"""ANE314: awkward strides as phases or as slices, against PyTorch's own convolutions."""

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
from mil_ane_passes.rewrites.convolution.factor_conv_stride import find_awkward_stride_axes
from mil_ane_passes.runtime import Runtime
from tests.rewrites.convolutions import WAYS, built, converted, distance, draw
from tests.rewrites.helpers import configure_rewrite, kinds

NAME = "factor_conv_stride"
LAYERS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}


rule = partial(configure_rewrite, NAME)


def with_layer(layer, shape):
    flat = [pad for pad in layer.padding for _ in range(2)]
    return built(
        lambda x, weight, bias: mb.conv(x=x, weight=weight, bias=bias, strides=list(layer.stride), pad_type="custom",
                                        pad=flat, dilations=list(layer.dilation), groups=layer.groups, name="y"),
        layer, shape)


def no_awkward_stride(program_):
    return not any(find_awkward_stride_axes(op) for _, op in iterate_ops(program_) if op.op_type == "conv")


def test_which_strides_are_meant():
    def found(*strides):
        held = build_program(lambda x: mb.conv(x=x, weight=np.zeros((1, 1, 1, 1), np.float16), strides=list(strides)),
                             x=(1, 1, 40, 40))
        return bool(find_matches(rule(), held).fired)

    assert [stride for stride in range(1, 25) if found(1, stride)] == [5, 7, 10, 11, 13, 14, 15, 17, 19, 20, 21, 22, 23]
    assert found(5, 2) and not found(4, 9)


@pytest.mark.law
@given(st.sampled_from([5, 7, 10]), st.integers(1, 16), st.integers(0, 3), st.integers(0, 3), st.integers(16, 40),
       st.sampled_from([1, 2]), st.sampled_from(["custom", "same", "valid", "same_lower"]))
def test_phases_are_pytorchs_conv1d(stride, kernel, before, behind, length, groups, kind):
    """Whatever the remainder of kernel and length, with pads of either side."""
    torch.manual_seed(0)
    layer, shape = torch.nn.Conv1d(4, 6, kernel, stride, groups=groups), (2, 4, length)
    given_pads = {"pad": [before, behind]} if kind == "custom" else {}
    made = built(
        lambda x, weight, bias: mb.conv(x=x, weight=weight, bias=bias, strides=[stride], pad_type=kind, groups=groups,
                                        name="y", **given_pads), layer, shape)
    if kind != "custom":
        total = max((-(-length // stride) - 1) * stride + kernel - length, 0) if kind != "valid" else 0
        before, behind = (total - total // 2, total // 2) if kind == "same_lower" else (total // 2, total - total // 2)
    assert apply_rewrite(rule(), made).fired
    assert no_awkward_stride(made) and not find_matches(rule(), made).fired
    with torch.no_grad():
        padded = torch.nn.functional.pad(torch.from_numpy(draw(shape)).double(), (before, behind))
        expected = layer.double()(padded).numpy()
    found = Runtime(made, precision="float64")({"x": draw(shape)})["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [
    ((5, 7), (5, 7), 0), ((6, 3), (5, 2), (2, 1)), ((2, 9), (3, 7), 1), ((14, 14), 14, 0), ((11, 11), 10, 5),
])
def test_phases_are_pytorchs_conv2d(kernel, stride, padding):
    torch.manual_seed(0)
    layer, shape = torch.nn.Conv2d(4, 6, kernel, stride, padding, groups=2), (2, 4, 29, 31)
    if isinstance(padding, int):
        layer.padding = (padding, padding)
    made = with_layer(layer, shape)
    assert apply_rewrite(rule(), made).fired
    assert no_awkward_stride(made)
    assert distance(made, layer, shape) < 1e-12
    assert distance(made, layer, shape, "float16") < 5e-3


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_slices_are_pytorchs_conv(rank):
    """Dilated and of symbolic size, which phases refuse; of rank 5, too."""
    torch.manual_seed(0)
    layer = LAYERS[rank](2, 4, 3, (5, 2, 7)[:rank], 1, dilation=2)
    shape = (1, 2, 12, 9, 11)[:rank + 2]
    made = with_layer(layer, (1, 2, *[None] * rank))
    assert not find_matches(rule(), made).fired
    assert apply_rewrite(rule(form="slice"), made).fired
    assert no_awkward_stride(made)
    assert distance(made, layer, shape) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", [
    torch.nn.Conv1d(1, 8, 10, 5, bias=False), torch.nn.Conv2d(3, 8, 14, 14), torch.nn.Conv2d(3, 4, 7, (7, 4), 3),
], ids=["speech encoder", "patches of 14", "one axis"])
def test_as_torch_converts(layer, way, target, tmp_path):
    shape = (1, 1, 203) if layer.weight.dim() == 3 else (1, 3, 42, 56)
    before = converted(layer, shape, way, tmp_path, target=target)
    assert find_matches(rule(), before).fired
    after = converted(layer, shape, way, tmp_path, passes=NAME, target=target)
    assert no_awkward_stride(after)
    assert distance(after, layer, shape) < 1e-12
    PassPipelineManager.apply_pipeline(after, ane.pipeline(passes="full"))
    assert no_awkward_stride(after)
    assert distance(after, layer, shape) < 1e-12


@pytest.mark.law
@given(st.tuples(st.integers(1, 8), st.integers(1, 8)), st.tuples(st.sampled_from([5, 7, 10]), st.sampled_from([5, 7])),
       st.tuples(st.integers(8, 31), st.integers(8, 40)), st.integers(1, 2), st.sampled_from([1, 2]),
       st.sampled_from(["custom", "same", "valid", "same_lower"]), st.integers(0, 3))
def test_windows_on_two_axes(kernel, stride, extents, batch, groups, kind, pad):
    """In phases of both axes, or in rows: the same sums as at the stride itself."""
    weight = np.random.default_rng(2).standard_normal((6, 4 // groups, *kernel)).astype(np.float16)
    given_pads = {"pad": [pad, 1, 0, pad]} if kind == "custom" else {}
    made = build_program(lambda x: mb.conv(x=x, weight=weight, strides=list(stride), pad_type=kind, groups=groups,
                                           bias=np.float16([1, -2, 0.5, 3, 4, -1]), name="y", **given_pads),
                         x=(batch, 4, *extents))
    before = Runtime(made, precision="float64")({"x": draw((batch, 4, *extents))})["y"]
    assert apply_rewrite(rule(), made).fired
    assert no_awkward_stride(made) and not find_matches(rule(), made).fired
    assert max(op.outputs[0].rank for _, op in iterate_ops(made)) <= 5
    found = Runtime(made, precision="float64")({"x": draw((batch, 4, *extents))})["y"]
    np.testing.assert_allclose(found, before, rtol=0, atol=1e-12 * max(1, np.abs(before).max()))


def patches(shape, kernel, stride, outputs=16):
    weight = np.ones((outputs, shape[1], *kernel), np.float16)
    held = build_program(lambda x: mb.conv(x=x, weight=weight, strides=[stride] * 2, name="y"), x=shape)
    assert apply_rewrite(rule(), held).fired
    return [op for _, op in iterate_ops(held) if op.op_type == "conv"][0].weight.shape


def test_windows_lie_in_rows_where_that_moves_fewer_padded_bytes():
    """Maps of 5 columns are padded 6.4 times, rows of 14 elements 2.3 times; maps of 32 columns are not padded."""
    assert patches((1, 3, 70, 70), (14, 14), 14) == (16, 42, 14, 1)
    assert patches((1, 3, 70, 448), (14, 14), 14) == (16, 588, 1, 1)
    assert patches((1, 3, 70, 70), (14, 14), 14, outputs=4096) == (4096, 588, 1, 1), "the result is moved as well"
    assert patches((1, 3, 70, 70), (15, 14), 14) == (16, 588, 2, 1), "they overlap"
    assert patches((1, 3, 70, 70), (14, 15), 14) == (16, 588, 1, 2), "they overlap"


def test_readers_of_one_weight_that_would_be_laid_out_apart():
    weight = np.ones((16, 3, 14, 14), np.float16)

    def body(x, wide):
        held = mb.const(val=weight, name="w")
        return [mb.conv(x=each, weight=held, strides=[14, 14], name=name) for each, name in ((x, "y"), (wide, "z"))]

    trace = apply_rewrite(rule(), build_program(body, x=(1, 3, 70, 70), wide=(1, 3, 70, 448)))
    assert {miss.reason for miss in trace.near_misses} == {
        "weight has other users, so its phases would store it twice; form=slice keeps it"}


def test_fp32_stays(tmp_path):
    found = find_matches(
        rule(), converted(torch.nn.Conv1d(1, 8, 10, 5), (1, 1, 103), "traced", tmp_path, precision="FLOAT32")
    )
    assert [miss.reason for miss in found.near_misses] == ["computed in fp32, which is unsupported on the ANE"]


def test_convs_that_share_a_weight_share_its_phases():
    weight = np.random.default_rng(0).standard_normal((6, 4, 10)).astype(np.float16)

    def body(x):
        held = mb.const(val=weight, name="w")
        return [mb.conv(x=value, weight=held, strides=[5], name=name)
                for value, name in ((x, "y"), (mb.relu(x=x), "z"))]

    made = build_program(body, x=(1, 4, 40))
    assert len(apply_rewrite(rule(), made).fired) == 2
    large = [op for _, op in iterate_ops(made) if op.op_type == "const" and np.size(op.val.val) == weight.size]
    assert len(large) == 1


def test_a_weight_read_at_another_stride_is_not_stored_twice():
    weight = np.zeros((6, 4, 10), np.float16)

    def body(x):
        held = mb.const(val=weight, name="w")
        return [mb.conv(x=x, weight=held, strides=[step], name=f"y{step}") for step in (5, 4)]

    made = build_program(body, x=(1, 4, 40))
    text = format_program(made)
    trace = apply_rewrite(rule(), made)
    assert not trace.fired and format_program(made) == text
    assert [miss.reason for miss in trace.near_misses] == [
        "weight has other users, so its phases would store it twice; form=slice keeps it"]
    assert apply_rewrite(rule(form="slice"), made).fired
    assert kinds(made)["slice_by_index"] == 1


def test_a_weight_read_by_an_op_without_strides_stays():
    def body(x):
        weight = mb.const(val=np.zeros((6, 4, 10), np.float16), name="w")
        return [mb.conv(x=x, weight=weight, strides=[5], name="y"), mb.relu(x=weight, name="z")]

    trace = apply_rewrite(rule(), build_program(body, x=(1, 4, 40)))
    assert not trace.fired
    assert [miss.reason for miss in trace.near_misses] == [
        "weight has other users, so its phases would store it twice; form=slice keeps it"]


def test_what_the_page_says_of_infinite_inputs():
    """With a kernel longer than the stride and no multiple of it, zeros meet elements beside the window."""
    made = build_program(
        lambda x: mb.conv(x=x, weight=np.ones((1, 1, 7), np.float16), strides=[5], name="y"), x=(1, 1, 12)
    )
    x = np.ones((1, 1, 12), np.float32)
    x[0, 0, 8] = np.inf
    assert np.isfinite(Runtime(made, precision="float64")({"x": x})["y"]).tolist() == [[[True, False]]]
    apply_rewrite(rule(), made)
    assert np.isnan(Runtime(made, precision="float64")({"x": x})["y"]).tolist() == [[[True, False]]]


def test_a_kernel_shorter_than_its_stride_takes_no_more_room_and_meets_nothing_else():
    made = build_program(
        lambda x: mb.conv(x=x, weight=np.ones((1, 1, 3), np.float16), strides=[5], name="y"), x=(1, 1, 10)
    )
    x = np.ones((1, 1, 10), np.float32)
    x[0, 0, 4] = np.inf
    apply_rewrite(rule(), made)
    np.testing.assert_array_equal(Runtime(made, precision="float64")({"x": x})["y"], [[[3, 3]]])
    (conv,) = (op for op in made.functions["main"].operations if op.op_type == "conv")
    assert conv.weight.shape == (1, 3, 1)
