"""ANE303 against PyTorch: unequal pads are output_padding, and become equal ones and a slice."""

from __future__ import annotations

import itertools
from functools import partial

import coremltools as ct
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from hypothesis import assume, given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.pipeline import sort_passes
from tests.rewrites.convolutions import WAYS, built, converted, distance
from tests.rewrites.helpers import configure_rewrite, kinds

NAME = "symmetrize_conv_transpose_pad"
FAULT = ["asymmetric_conv_transpose_pad"]
LAYERS = {1: torch.nn.ConvTranspose1d, 2: torch.nn.ConvTranspose2d, 3: torch.nn.ConvTranspose3d}


rule = partial(configure_rewrite, NAME)


def pads(program):
    return [op.pad.val.reshape(-1, 2).tolist() for _, op in iterate_ops(program) if op.op_type == "conv_transpose"]


def with_pads(layer, shape, flexible=False):
    """The layer in MIL, its output_padding as a shorter pad behind."""
    flat = [end for pad, more in zip(layer.padding, layer.output_padding) for end in (pad, pad - more)]
    return built(
        lambda x, weight, bias: mb.conv_transpose(
            x=x, weight=weight, bias=bias, pad_type="custom", pad=flat, strides=list(layer.stride),
            dilations=list(layer.dilation), groups=layer.groups, name="y"),
        layer, (None, shape[1], *[None] * (len(shape) - 2)) if flexible else shape)


def test_the_published_program_is_right_again():
    torch.manual_seed(0)
    layer, shape = torch.nn.ConvTranspose1d(1, 2, 3, stride=2, padding=1, output_padding=1, bias=False), (1, 1, 4)
    program = with_pads(layer, shape)
    assert distance(program, layer, shape) < 1e-12
    assert distance(program, layer, shape, quirks=FAULT) > 0.1
    assert distance(program, layer, shape, "float16", FAULT) > 0.1
    assert apply_rewrite(rule(), program).fired
    assert pads(program) == [[[0, 0]]]
    assert distance(program, layer, shape, quirks=FAULT) < 1e-12
    assert distance(program, layer, shape, "float16", FAULT) < 2e-3


@pytest.mark.law
@given(st.integers(1, 3), st.data())
def test_is_pytorchs_layer(rank, data):
    each = st.tuples(*[st.integers(1, 3)] * rank)
    kernel, stride, dilation = data.draw(each), data.draw(each), data.draw(each)
    padding = data.draw(st.tuples(*[st.integers(1, 3)] * rank))
    more = tuple(data.draw(st.integers(0, min(pad, max(step, spread) - 1)))
                 for pad, step, spread in zip(padding, stride, dilation))
    groups, flexible = data.draw(st.sampled_from([1, 2])), data.draw(st.booleans())
    torch.manual_seed(0)
    layer = LAYERS[rank](4, 2, kernel, stride, padding, more, groups, dilation=dilation)
    shape = (2, 4, 5, 4, 3)[:rank + 2]
    lengths = [(size - 1) * step + (taps - 1) * spread + 1 - 2 * pad + extra for size, step, taps, spread, pad, extra
               in zip(shape[2:], stride, kernel, dilation, padding, more)]
    assume(min(lengths) > 0)
    program = with_pads(layer, shape, flexible)
    assert bool(apply_rewrite(rule(), program).fired) == any(more)
    assert all(before == after for layer_pads in pads(program) for before, after in layer_pads)
    assert distance(program, layer, shape, quirks=FAULT) < 1e-12


@pytest.mark.parametrize("target", ["iOS15", "iOS17", "iOS18"])
@pytest.mark.parametrize("way", WAYS)
def test_the_hosts_own_unequal_pads_are_found_and_cured(way, target, tmp_path):
    """coremltools writes one where output_padding is larger than the padding of its axis."""
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose2d(3, 4, (3, 2), stride=2, padding=(1, 0), output_padding=1)
    shape = (1, 3, 5, 6)
    (tmp_path / "before").mkdir()
    before = converted(layer, shape, way, tmp_path / "before", target=target)
    assert find_matches(rule(), before).fired
    assert distance(before, layer, shape, quirks=FAULT) > 0.05
    after = converted(layer, shape, way, tmp_path, passes=NAME, target=target)
    assert not find_matches(rule(), after).fired
    assert distance(after, layer, shape, quirks=FAULT) < 1e-12


def test_in_fp32_it_is_left_alone(tmp_path):
    layer = torch.nn.ConvTranspose2d(3, 4, (3, 2), stride=2, padding=(1, 0), output_padding=1)
    found = find_matches(rule(), converted(layer, (1, 3, 5, 6), "traced", tmp_path, precision="FLOAT32"))
    assert not found.fired
    assert [miss.reason for miss in found.near_misses] == ["computed in fp32, which is correct according to the report"]


@pytest.mark.parametrize(("rank", "groups", "way"), itertools.product((1, 2, 3), (1, 2), WAYS[:2]))
def test_equal_pads_are_left_alone_and_everything_stays_right(rank, groups, way, tmp_path):
    """Through coremltools with all safe passes: stride, padding, output_padding (not in 3-D, by coremltools) and
    dilation."""
    torch.manual_seed(0)
    layer = LAYERS[rank](4, 6, 3, 2, 1, 0 if rank == 3 else 1, groups, dilation=1 + (rank == 1))
    shape = (1, 4, 5, 4, 3)[:rank + 2]
    after = converted(layer, shape, way, tmp_path, passes="safe")
    assert kinds(after)["conv_transpose"] == 1
    assert all(before == behind for layer_pads in pads(after) for before, behind in layer_pads)
    assert distance(after, layer, shape, quirks=[*FAULT, "conv_transpose_1d_bias"]) < 1e-12


def test_together_with_the_lift():
    torch.manual_seed(0)
    layer, shape = torch.nn.ConvTranspose1d(4, 6, 5, stride=3, padding=2, output_padding=1), (2, 4, 9)
    program = with_pads(layer, shape)
    faults = [*FAULT, "conv_transpose_1d_bias"]
    assert distance(program, layer, shape, quirks=faults) > 0.05
    PassPipelineManager.apply_pipeline(program, ane.pipeline())
    counted = kinds(program)
    assert (counted["expand_dims"], counted["squeeze"], counted["slice_by_index"]) == (1, 1, 1)
    assert distance(program, layer, shape, quirks=faults) < 1e-12
    once = format_program(program)
    PassPipelineManager.apply_pipeline(program, ane.pipeline())
    assert format_program(program) == once


def test_it_stands_behind_what_makes_unequal_pads_or_moves_them():
    order = sort_passes([NAME, "explicit_conv_transpose_shape", "lift_conv_transpose_1d"])
    assert order == ["lift_conv_transpose_1d", "explicit_conv_transpose_shape", NAME]


def test_the_hosts_default_pipeline_does_not_undo_it():
    torch.manual_seed(0)
    layer, shape = torch.nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), (1, 3, 5, 6)
    program = with_pads(layer, shape)
    apply_rewrite(rule(), program)
    PassPipelineManager.apply_pipeline(program, ct.PassPipeline.DEFAULT)
    assert pads(program) == [[[0, 0], [0, 0]]]
    assert not find_matches(rule(), program).fired
    assert distance(program, layer, shape, quirks=FAULT) < 1e-12
