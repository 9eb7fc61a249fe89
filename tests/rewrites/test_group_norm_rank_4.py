"""ANE236: group norms in four axes, against PyTorch's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite
from tests.rewrites.spellings import converted, outputs

NAME = "group_norm_rank_4"


rule = partial(configure_rewrite, NAME)


def highest(held):
    return max(var.rank for _, op in iterate_ops(held) for var in op.outputs)


def norm(x, groups, eps=1e-5):
    """As coremltools writes torch's group_norm."""
    batch, channels, *size = x.shape
    shape = [-1 if not isinstance(batch, (int, np.integer)) else batch, groups, channels // groups, *size]
    cut = mb.reshape(x=x, shape=shape)
    axes = list(range(2, len(shape)))
    off = mb.sub(x=cut, y=mb.reduce_mean(x=cut, axes=axes, keep_dims=True))
    spread = mb.reduce_mean(x=mb.square(x=off), axes=axes, keep_dims=True)
    spread = mb.sqrt(x=mb.add(x=spread, y=np.float16(eps)))
    return mb.reshape(x=mb.real_div(x=off, y=spread), shape=[shape[0], channels, *size], name="y")


@pytest.mark.law
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(2, 6), st.integers(1, 6), st.booleans(),
       st.integers(0, 2**31))
def test_is_pytorchs_group_norm(batch, groups, each, height, width, open_batch, seed):
    shape = (batch, groups * each, height, width)
    held = build_program(lambda x: norm(x, groups), x=(None, *shape[1:]) if open_batch else shape)
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    feeds = {"x": x.astype(np.float32)}
    before = Runtime(held, precision="float16")(feeds)["y"]
    assert apply_rewrite(rule(), held).fired and highest(held) <= 4
    eps = float(np.float16(1e-5))
    true = torch.nn.functional.group_norm(torch.from_numpy(x.astype(np.float64)), groups, eps=eps).numpy()
    np.testing.assert_allclose(Runtime(held, precision="float64")(feeds)["y"], true, rtol=0, atol=1e-10)
    after = Runtime(held, precision="float16")(feeds)["y"]
    own = np.abs(before - true).max()
    assert np.abs(after - true).max() <= 4 * own + 1e-3 * np.abs(true).max() + 1e-12


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("shape", [(1, 32, 8, 8), (2, 32, 4, 6)])
def test_as_torch_converts(way, shape, tmp_path):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Conv2d(shape[1], 64, 3, padding=1), torch.nn.GroupNorm(8, 64), torch.nn.SiLU())
    layer.requires_grad_(False)

    def function(x):
        return layer.to(x.dtype)(x)

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.half().float())
        before = converted(layer, way, tmp_path / "before", shape=shape)
        after = converted(layer, way, tmp_path / "after", passes=NAME, shape=shape)
    assert highest(before) == 5 and highest(after) == 4
    rules = [each() for each in get_all_rules().values()]
    found = {item.rule.name for item in predict_plan(after, rules, target="m4")[1] if hasattr(item.answer, "covers")}
    assert "group_norm_rank_5" not in found
    assert not [row for row in predict_plan(after, rules, target="m4")[0].rows if row.ane == "no"]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    with torch.no_grad():
        true = function(torch.from_numpy(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(outputs(after, x, "float64"), true, atol=2e-4)  # eps is held in fp16
    np.testing.assert_allclose(outputs(after, x, "float64"), outputs(before, x, "float64"), rtol=0, atol=1e-10)


def test_a_volume_is_left_alone():
    """Rank 6 is another pass's, and a norm that leaves rank 5 for nobody stays as it is."""
    held = build_program(lambda x: norm(x, 2), x=(1, 4, 2, 2, 2))
    assert not find_matches(rule(), held).fired and not find_matches(rule(), held).near_misses
    assert apply_rewrite(find_rewrite("lower_rank").configured(), held).fired and highest(held) <= 5


def test_a_value_that_is_an_output_holds_the_region():
    def body(x):
        cut = mb.reshape(x=x, shape=[1, 2, 2, 4, 4])
        return mb.sub(x=cut, y=mb.reduce_mean(x=cut, axes=[2, 3, 4], keep_dims=True), name="y")

    found = find_matches(rule(), build_program(body, x=(1, 4, 4, 4)))
    assert [miss.reason for miss in found.near_misses] == ["'y' of rank 5 is an output"]


def test_a_region_with_an_element_of_a_list_is_left_alone():
    def body(x):
        cut = mb.reshape(x=x, shape=[1, 2, 2, 4, 4])
        made = mb.make_list(init_length=1, elem_shape=(2, 2, 4, 4), dtype="fp16")
        made = mb.list_write(ls=made, index=0, value=mb.reshape(x=x, shape=[2, 2, 4, 4]))
        off = mb.sub(x=mb.list_gather(ls=made, indices=[0], name="kept"), y=mb.reduce_mean(
            x=cut, axes=[2, 3, 4], keep_dims=True))
        return mb.reshape(x=off, shape=[1, 4, 4, 4], name="y")

    found = find_matches(rule(), build_program(body, x=(1, 4, 4, 4)))
    assert [miss.reason for miss in found.near_misses] == ["list_gather 'kept' works on a list"] and not found.fired
