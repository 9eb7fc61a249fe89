"""ANE222: large maxima in steps, against PyTorch's own pooling."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.rewrites.convolutions import WAYS, BehindRelu, converted, distance
from tests.rewrites.helpers import kinds
from tests.rewrites.windows import configured, drawn, holds, refused

NAME = "chain_max_pool"


def pooled(sizes, shape, opset=ct.target.iOS17, **parameters):
    parameters.setdefault("pad_type", "valid")
    return build_program(lambda x: mb.max_pool(x=x, kernel_sizes=sizes, name="y", **parameters), opset=opset, x=shape)


def reasons(program_, target="all", **options):
    found = find_matches(configured(NAME, **options), program_, target=target)
    assert not found.fired
    return [miss.reason for miss in found.near_misses]


@st.composite
def pools(draw):
    rank = draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 20)) for _ in range(rank - 1)] + [draw(st.integers(9, 40))]
    strides = [draw(st.integers(1, 5)) for _ in sizes]
    kind = draw(st.sampled_from(["same", "same_lower", "valid", "custom"]))
    ceil = rank < 3 and kind in ("valid", "custom") and draw(st.booleans())
    pads = []
    for size in sizes if kind == "custom" else []:
        before, after = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
        pads += [before, before if ceil else after]
    rest = pads or [0] * 2 * rank
    least = [1 if kind.startswith("same") else max(1, size - sum(rest[2 * axis:2 * axis + 2]))
             for axis, size in enumerate(sizes)]
    shape = (draw(st.integers(1, 2)), 2, *(low + draw(st.integers(0, 12)) for low in least))
    given_pads = {"pad": pads} if pads else {}
    return sizes, shape, {"strides": strides, "pad_type": kind, "ceil_mode": ceil, **given_pads}


@pytest.mark.law
@given(pools(), st.sampled_from(["all", "m4", "m1", "a13"]))
def test_every_window_is_the_same(pool, target):
    sizes, shape, parameters = pool
    made = pooled(sizes, shape, **parameters)
    before = refused(made, target)
    trace = holds(made, NAME, target=target)
    if trace.fired:
        assert before and not refused(made, target)
    else:
        assert not before or [miss.reason for miss in trace.near_misses] != []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layer", "shape"), [
    (torch.nn.MaxPool2d(13, 1, 6), (1, 4, 20, 20)), (torch.nn.MaxPool2d((3, 12), (2, 3), (1, 5)), (1, 4, 20, 31)),
    (torch.nn.MaxPool1d(10, 4, 3, ceil_mode=True), (1, 4, 52)), (torch.nn.MaxPool1d(40), (2, 4, 40)),
    (torch.nn.MaxPool3d((1, 2, 9), 1), (1, 4, 3, 8, 20)), (torch.nn.AdaptiveMaxPool2d(1), (1, 4, 40, 40)),
], ids=["pyramid", "strided", "more counted", "all of a text", "3-D", "global"])
def test_as_torch_converts(layer, shape, way, target, tmp_path):
    after = converted(BehindRelu(layer), shape, way, tmp_path, passes=NAME, target=target)
    assert not refused(after, "m4") and not refused(after, "m1")
    assert distance(after, BehindRelu(layer), shape) == 0


def test_a_pyramid_is_taken_on_an_m4():
    """The three pools of a spatial pyramid: 5 fits, 9 and 13 become two steps each."""
    made = build_program(lambda x: [mb.max_pool(x=x, kernel_sizes=[size] * 2, pad_type="same", name=f"y{size}")
                                    for size in (5, 9, 13)], x=(1, 8, 20, 20))
    assert len(refused(made, "m4")) == 2
    trace = holds(made, NAME, target="m4")
    assert [hit.reason for hit in trace.fired] == [
        "window 9 on axis 3, the limit is 8: 1x5, 9x5", "window 13 on axis 3, the limit is 8: 1x7, 13x7"]
    assert not refused(made, "m4") and kinds(made)["max_pool"] == 5


def test_one_window_over_all_is_a_reduction():
    made = pooled([40, 40], (1, 3, 40, 40))
    assert holds(made, NAME).fired
    assert kinds(made)["reduce_max"] == 1 and not kinds(made)["max_pool"]


def test_where_all_is_minus_infinity_it_stays_so():
    made = pooled([1, 9], (1, 1, 1, 5), pad_type="custom", pad=[0, 0, 8, 8])
    apply_rewrite(configured(NAME), made)
    feeds = {"x": np.full((1, 1, 1, 5), -np.inf, np.float32)}
    assert np.all(Runtime(made, precision="float64")(feeds)["y"] == -np.inf)


def test_old_chips_have_limits_of_their_own():
    made = pooled([14, 3], (1, 2, 20, 20), strides=[4, 1])
    words = ["unsupported on A12 and A13 only; choose one of them as the target"]
    assert reasons(made) == words and not find_matches(configured(NAME), made, target="m4").near_misses
    trace = holds(made, NAME, target="a13")
    assert [hit.reason for hit in trace.fired] == ["window 14 on axis 2, the limit is 13 and stride 4: 8x1, 7x3"]
    assert not refused(made, "a13") and kinds(made)["slice_by_index"] == 1
    assert apply_rewrite(configured(NAME, always=True), pooled([14, 3], (1, 2, 20, 20))).fired


def test_a_symbolic_size_stays_symbolic():
    made = pooled([9, 9], (None, 2, None, None), strides=[2, 3], pad_type="custom", pad=[4, 4, 4, 3])
    assert holds(made, NAME, extent=13).fired
    assert holds(pooled([9, 9], (1, 2, None, None), pad_type="same_lower"), NAME, extent=5).fired
    assert reasons(pooled([9], (1, 2, None), strides=[2], ceil_mode=True)) == [
        "ceil_mode depends on the input's size, which is symbolic"]


def test_several_functions_and_the_input_read_twice():
    made = build_program(lambda x: mb.add(x=mb.max_pool(x=x, kernel_sizes=[1, 9], pad_type="same"),
                                          y=mb.max_pool(x=x, kernel_sizes=[1, 9], pad_type="same"), name="y"),
                         x=(1, 2, 4, 12), opset=ct.target.iOS15)
    assert len(holds(made, NAME).fired) == 2


def test_the_hosts_pipeline_leaves_it(tmp_path):
    made = ct.convert(pooled([9, 9], (1, 2, 12, 12)), convert_to="mlprogram", skip_model_load=True,
                      pass_pipeline=ane.pipeline(passes=NAME), minimum_deployment_target=ct.target.iOS17)
    made.save(str(tmp_path / "m.mlpackage"))
    again = ane.load(tmp_path / "m.mlpackage").program
    assert kinds(again)["max_pool"] == 2 and not refused(again, "m4")
    assert drawn(again) and all(op.op_type != "pad" for _, op in iterate_ops(again))
