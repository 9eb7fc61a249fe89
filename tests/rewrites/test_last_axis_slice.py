"""ANE315: the same elements as PyTorch's indexing, from another axis."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.rewrites.indexing.last_axis_slice import has_offset, read_slice_start
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model, load_converted
from tests.rewrites.helpers import kinds, only_output
from tests.rewrites.spellings import spelt

SPELLINGS = {
    "slice": (lambda x: x[..., 2:5], "slice_by_index"),
    "from the end": (lambda x: x[..., -3:], "slice_by_index"),
    "every second": (lambda x: x[..., 1::2], "slice_by_index"),
    "index": (lambda x: x[..., 3], "slice_by_index"),
    "narrow": (lambda x: x.narrow(-1, 2, 3), "slice_by_index"),
    "rotary": (lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1), "slice_by_index"),
    "chunk": (lambda x: torch.cat(torch.chunk(x, 2, -1)[::-1], -1), "split"),
    "glu": (lambda x: torch.nn.functional.glu(x, -1), "split"),
    "split": (lambda x: torch.split(x, [3, 5], -1)[1], "split"),
}


def converted(function, x, exported, target=ct.target.iOS17, pipeline=None):
    return convert_model(spelt(function), x, way="exported" if exported else "traced", convert_to="milinternal",
                         minimum_deployment_target=target, compute_precision=ct.precision.FLOAT16,
                         pass_pipeline=pipeline)


def struck(built):
    """The ops that begin inside the last axis of what they read."""
    found = [op for _, op in iterate_ops(built) if op.op_type in ("slice_by_index", "slice_by_size", "split")]
    return [op for op in found if has_offset(read_slice_start(op), op.x.rank - 1)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_found_as_torch_spells_it(spelling, exported):
    function, kind = SPELLINGS[spelling]
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float16)).float()
    built = converted(function, x, exported)
    fired = apply_rewrite(find_rewrite("last_axis_slice").configured(), built).fired
    assert {finding.op for finding in fired} == {kind} and not struck(built)
    found = only_output(built, x.numpy(), "float64")
    np.testing.assert_allclose(found, function(x.double()).numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(tmp_path, target):
    x = torch.zeros(2, 4, 8)
    loaded = load_converted(spelt(lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1)), x, passes="last_axis_slice",
                            path=tmp_path / "m.mlpackage", minimum_deployment_target=target)
    assert kinds(loaded)["transpose"] == 2 and not struck(loaded)
    assert not find_matches(find_rewrite("last_axis_slice").configured(), loaded).fired


def test_the_hosts_reduce_transposes_undoes_a_split_as_the_page_says():
    built = build_program(lambda x: list(mb.split(x=x, split_sizes=[3, 5], axis=-1)), x=(2, 4, 8))
    PassPipelineManager.apply_pipeline(built, ane.pipeline(passes="last_axis_slice"))
    assert not struck(built)
    PassPipelineManager.apply_pipeline(built, ct.PassPipeline.DEFAULT)
    assert struck(built)


def test_it_is_gated_to_the_measured_generations():
    built = build_program(lambda x: mb.slice_by_index(x=x, begin=[0, 2], end=[4, 5], name="y"), x=(4, 8))
    rule = find_rewrite("last_axis_slice").configured()
    fires = {
        target: bool(find_matches(rule, built, target=target).fired)
        for target in ("a13", "m1", "m2", "m3", "m4", "all")
    }
    assert fires == {"a13": False, "m1": True, "m2": True, "m3": False, "m4": False, "all": True}


def test_the_published_fault_no_longer_reaches_it():
    x = np.full((1, 4, 8), 5000.0, np.float16)
    built = build_program(lambda x: mb.slice_by_index(x=x, begin=[0, 0, 2], end=[1, 4, 5], name="y"), x=x.shape)
    assert np.isinf(only_output(built, x, "float16", ["last_axis_slice_4094"])).all()
    apply_rewrite(find_rewrite("last_axis_slice").configured(), built)
    right = torch.from_numpy(x)[..., 2:5].numpy()
    np.testing.assert_array_equal(only_output(built, x, "float16", ["last_axis_slice_4094"]), right)


@st.composite
def slices(draw):
    """A shape and a slice of it that leaves something."""
    shape = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    begin = [draw(st.integers(0, extent - 1)) for extent in shape]
    end = [draw(st.integers(first + 1, extent)) for first, extent in zip(begin, shape)]
    stride = [draw(st.integers(1, 2)) for _ in shape]
    masks = {name: [draw(st.booleans()) for _ in shape] for name in ("begin_mask", "end_mask")}
    dropped = [draw(st.booleans()) for _ in shape]
    dropped[draw(st.integers(0, len(shape) - 1))] = False
    return shape, {"begin": begin, "end": end, "stride": stride, "squeeze_mask": dropped, **masks}


@pytest.mark.law
@given(slices())
def test_any_slice_keeps_its_elements(drawn):
    shape, parameters_ = drawn
    x = np.arange(np.prod(shape), dtype=np.float16).reshape(shape)
    try:
        built = build_program(lambda x: mb.slice_by_index(x=x, name="y", **parameters_), x=tuple(shape))
    except (ValueError, AssertionError):
        return
    before = Runtime(built, precision="float16")({"x": x})["y"]
    if apply_rewrite(find_rewrite("last_axis_slice").configured(), built).fired:
        assert not struck(built)
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], before)
