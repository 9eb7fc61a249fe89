"""ANE228: dilated convs over the phases of their input, against PyTorch's own."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ir.query import get_const_value, iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.rewrites.convolutions import WAYS, converted, distance, draw
from tests.rewrites.helpers import kinds
from tests.rewrites.windows import configured, holds, refused

NAME = "undilate_conv"


def conv(kernel, shape, groups=1, **parameters):
    weight = (np.random.default_rng(1).standard_normal((4, shape[1] // groups, *kernel)) / 4).astype(np.float16)
    return build_program(lambda x: mb.conv(x=x, weight=weight, groups=groups, name="y", **parameters), x=shape)


def dilated(program_):
    return [
        op for _, op in iterate_ops(program_) if op.op_type == "conv" and max(get_const_value(op.dilations, [1])) > 1
    ]


@st.composite
def convs(draw_):
    rank = draw_(st.integers(1, 3))
    kernel = [draw_(st.integers(1, 4)) for _ in range(rank)]
    dilations = [draw_(st.integers(1, 5)) for _ in range(rank)]
    strides = [draw_(st.sampled_from([1, 1, 1, 2, step, 2 * step])) for step in dilations]
    kind = draw_(st.sampled_from(["same", "same_lower", "valid", "custom"]))
    pads = [draw_(st.integers(0, 6)) for _ in range(2 * rank)] if kind == "custom" else []
    least = [1 if kind.startswith("same") else max(1, (size - 1) * step + 1 - sum(pads[2 * axis:2 * axis + 2]))
             for axis, (size, step) in enumerate(zip(kernel, dilations))]
    shape = (draw_(st.integers(1, 2)), 4, *(low + draw_(st.integers(0, 9)) for low in least))
    given_pads = {"pad": pads} if pads else {}
    return kernel, shape, {"strides": strides, "dilations": dilations, "pad_type": kind,
                           "groups": draw_(st.sampled_from([1, 2, 4])), **given_pads}


@pytest.mark.law
@given(convs())
def test_every_sum_is_the_same(drawn):
    kernel, shape, parameters = drawn
    made = conv(kernel, shape, **parameters)
    before = refused(made, "a13")
    trace = holds(made, NAME, target="a13")
    if trace.fired:
        assert before and "conv" not in refused(made, "a13")
    else:
        assert not before or {miss.reason for miss in trace.near_misses} <= {
            "a stride that is not a multiple of the dilation", "3-D, and its phases would need rank 6"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layer", "shape"), [
    (torch.nn.Conv1d(8, 8, 3, padding=27, dilation=27, groups=2), (1, 8, 100)),
    (torch.nn.Conv2d(4, 8, 3, padding=12, dilation=12), (1, 4, 33, 33)),
    (torch.nn.Conv2d(4, 8, (3, 5), dilation=(1, 2), stride=(2, 1), padding=(1, 4)), (2, 4, 16, 16)),
], ids=["vocoder", "atrous", "one axis"])
def test_as_torch_converts(layer, shape, way, tmp_path):
    after = converted(layer, shape, way, tmp_path)
    assert dilated(after) and apply_rewrite(configured(NAME), after, target="a13").fired
    assert not dilated(after) and distance(after, layer, shape) < 1e-12
    assert distance(after, layer, shape, "float16") < 3e-3
    PassPipelineManager.apply_pipeline(after, ct.PassPipeline.DEFAULT)
    assert not dilated(after) and distance(after, layer, shape) < 1e-12


def test_it_is_for_old_chips_unless_asked(tmp_path):
    made = conv([3, 3], (1, 4, 9, 9), dilations=[2, 2])
    for target in ("all", "m1", "m4"):
        assert [miss.reason for miss in find_matches(configured(NAME), made, target=target).near_misses] == [
            "supported on M4; choose A13 or older as the target, or always=true"]
    asked = converted(torch.nn.Conv2d(4, 4, 3, dilation=2), (1, 4, 9, 9), "traced", tmp_path,
                      passes="undilate_conv{always=true}")
    assert not dilated(asked) and kinds(asked)["transpose"] == 4


def test_an_infinite_input_reaches_no_output_it_did_not():
    made = conv([3], (1, 4, 40), dilations=[3])
    x = draw((1, 4, 40))
    x[0, 0, 20] = np.inf
    before = Runtime(made, precision="float64")({"x": x})["y"]
    assert apply_rewrite(configured(NAME, always=True), made).fired
    np.testing.assert_array_equal(np.isfinite(before), np.isfinite(Runtime(made, precision="float64")({"x": x})["y"]))


def test_sizes_may_be_symbolic():
    assert holds(conv([3], (None, 4, 20), dilations=[2]), NAME, target="a13").fired
    assert holds(conv([3, 3], (1, 4, None, 20), dilations=[1, 2], pad_type="same"), NAME, target="a13").fired
    assert holds(conv([3], (None, 4, None), dilations=[2], strides=[2]), NAME, target="a13").fired
