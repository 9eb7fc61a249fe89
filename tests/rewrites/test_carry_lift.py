"""ANE102: a vocoder is expanded where its 1-D part starts and squeezed where it ends, and computes the same."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.ane.buffers import list_buffers
from mil_ane_passes.equivalence.comparison import compare_outputs
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.query import is_default
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from tests.lab.models import vocoder
from tests.rewrites.helpers import half, kinds, layout_ops, only_output, torch_outputs

WHATEVER_IT_TAKES = {"most_padded": 1 << 40}


def lifting(options=None):
    """`full` without the rewrite that splits the bias off where the target needs no lift: all are lifted."""
    return [rule for rule in select_rewrites("full", options=options) if rule.name != "split_conv_transpose_bias"]


@pytest.fixture(scope="module", params=["hifigan", "bigvgan"])
def kind(request):
    return request.param


@pytest.fixture(scope="module", params=[
    ("hifigan", "static"), ("bigvgan", "flexible"), pytest.param(("hifigan", "flexible"), marks=pytest.mark.slow),
    pytest.param(("bigvgan", "static"), marks=pytest.mark.slow)], ids="-".join)
def converted(request):
    kind, form = request.param
    return vocoder.convert_model(kind=kind, flexible=form == "flexible")._mil_program


@pytest.mark.parametrize("axis", [-1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_expand_and_one_squeeze_however_many_layers(converted, axis):
    after = clone_program(converted)
    options = {"lift_conv_1d": {"axis": axis, "always": True}, "lift_conv_transpose_1d": {"axis": axis},
               "carry_lift": WHATEVER_IT_TAKES}
    apply_rewrites(lifting(options), after)
    assert kinds(after)["expand_dims"] == kinds(after)["squeeze"] == 1
    assert all(op.x.rank == 4 for op in after.functions["main"].find_ops(op_type="conv_transpose"))
    report = compare_programs(converted, after, precisions=("float64", "float16"), seeds=1,
                              exactness=Exactness.BITWISE)
    assert report.equal, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hifigan", pytest.param("bigvgan", marks=pytest.mark.slow)], indirect=True)
def test_deeper_vocoders_have_no_more_layout_ops(kind):
    model = {"channels": 64, "rates": (2, 2, 2, 2), "kernels": (3, 5, 7), "dilations": (1, 3, 5), "frames": 4}
    deep = vocoder.convert_model(kind=kind, model=model)._mil_program
    apply_rewrites(lifting({"carry_lift": WHATEVER_IT_TAKES}), deep)
    assert kinds(deep)["expand_dims"] == kinds(deep)["squeeze"] == 1


def test_the_pipeline_twice_is_once(converted):
    once = clone_program(converted)
    apply_rewrites(select_rewrites("full"), once)
    assert not any(trace.fired for trace in apply_rewrites(select_rewrites("full"), once))


@pytest.mark.parametrize("kind", ["hifigan", pytest.param("bigvgan", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("preset", ["safe", "full"])
def test_is_still_what_pytorch_computes(kind, preset):
    """The package stores fp16 weights and coremltools folds scales into them in fp16, so at double precision it is
    within a few fp16 roundings of the module, which must be recognisable. `safe` must not move it at all; `full` adds
    the biases in ops of their own, which rounds once more."""
    module, example = vocoder.make_torch_model(kind)
    before = vocoder.convert_model(kind=kind)._mil_program
    after = clone_program(before)
    apply_rewrites(select_rewrites(preset), after)
    expected = torch_outputs(half(module), example)
    old = only_output(before, example.numpy(), "float64")
    new = only_output(after, example.numpy(), "float64")
    assert np.array_equal(old, new) if preset == "safe" else np.abs(old - new).max() <= 1e-14 * np.abs(old).max()
    error = np.abs(new - expected).max()
    assert error <= 2.0**-9 * np.abs(expected).max(), error
    typed = [only_output(each, example.numpy(), "float16") for each in (before, after)]
    if preset == "safe":
        (found,) = compare_outputs({"y": typed[0]}, {"y": typed[1]}, Exactness.BITWISE)
        assert found.equal_bits
    else:
        errors = [np.abs(each - expected).max() for each in typed]
        assert errors[1] <= 1.25 * errors[0], errors


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
def test_a_norm_whose_epsilon_the_host_filled_in_as_fp32_is_carried(opset):
    """pymil accepts the default in fp32 beside fp16, but not when it is given."""
    def body(x):
        x = mb.conv(x=x, weight=make_weight(8, 4, 3))
        x = mb.batch_norm(x=x, mean=make_weight(8), variance=np.ones(8, np.float16))
        return mb.conv(x=x, weight=make_weight(8, 8, 3), name="y")

    before = build_program(body, opset=opset, x=(1, 4, 20))
    (norm,) = before.functions["main"].find_ops(op_type="batch_norm")
    assert norm.epsilon.dtype == types.fp32 and is_default(norm, "epsilon")
    after = clone_program(before)
    apply_rewrites(select_rewrites(passes="lift_conv_1d{always=true},carry_lift"), after)
    assert after.functions["main"].find_ops(op_type="batch_norm")[0].x.rank == 4
    report = compare_programs(before, after, precisions=("float64", "float16"), exactness=Exactness.BITWISE)
    assert report.equal, str(report)


def test_a_value_read_outside_the_region_keeps_one_squeeze():
    bias = np.array([0.5, -1.0, 0.25, 2.0], dtype=np.float16)

    def body(x):
        first = mb.relu(x=mb.conv_transpose(x=x, weight=make_weight(4, 4, 3), bias=bias))
        second = mb.conv_transpose(x=first, weight=make_weight(4, 4, 3), bias=bias, name="y")
        return [second, mb.softmax(x=first, axis=-1, name="z")]

    built = build_program(body, x=(1, 4, 8))
    apply_rewrites(lifting(), built)
    assert kinds(built)["expand_dims"] == 1 and kinds(built)["squeeze"] == 2


def test_nothing_is_moved_across_a_norm_over_the_length():
    bias = np.array([0.5, -1.0, 0.25, 2.0], dtype=np.float16)

    def body(x):
        first = mb.conv_transpose(x=x, weight=make_weight(4, 4, 3), bias=bias)
        return mb.conv_transpose(x=mb.softmax(x=first, axis=-1), weight=make_weight(4, 4, 3), bias=bias, name="y")

    built = build_program(body, x=(1, 4, 8))
    apply_rewrites(lifting(), built)
    assert layout_ops(built) == 4
    assert built.functions["main"].find_ops(op_type="softmax")[0].x.rank == 3


def test_one_computed_operand_gets_one_expand_dims_and_the_region_goes_on():
    """FiLM: every layer is scaled by the same (N, C, 1) value that is an input."""
    bias = np.array([0.5, -1.0, 0.25, 2.0], dtype=np.float16)

    def body(x, g):
        for number in range(5):
            x = mb.mul(x=mb.conv_transpose(x=x, weight=make_weight(4, 4, 3), bias=bias), y=g, name=f"y{number}")
        return mb.conv_transpose(x=x, weight=make_weight(4, 4, 3), bias=bias, name="y")

    built = build_program(body, x=(2, 4, 8), g=(2, 4, 1))
    before = clone_program(built)
    apply_rewrites(lifting(), built)
    assert kinds(built)["expand_dims"] == 2 and kinds(built)["squeeze"] == 1
    assert compare_programs(before, built, exactness=Exactness.BITWISE).equal_bits


def test_a_computed_scalar_is_taken_as_it_is():
    bias = np.array([0.5, -1.0, 0.25, 2.0], dtype=np.float16)

    def body(x):
        size = mb.reduce_mean(x=x, axes=[0, 1, 2], keep_dims=False)
        first = mb.mul(x=mb.conv_transpose(x=x, weight=make_weight(4, 4, 3), bias=bias), y=size)
        return mb.conv_transpose(x=first, weight=make_weight(4, 4, 3), bias=bias, name="y")

    built = build_program(body, x=(1, 4, 8))
    before = clone_program(built)
    apply_rewrites(lifting(), built)
    assert layout_ops(built) == 2
    assert compare_programs(before, built, exactness=Exactness.BITWISE).equal_bits


def test_a_branch_that_reads_a_carried_value_reads_it_as_it_is():
    bias = np.array([0.5, -1.0, 0.25, 2.0], dtype=np.float16)

    def layer(x, **name):
        return mb.conv_transpose(x=x, weight=make_weight(4, 4, 3), bias=bias, **name)

    def body(x):
        first = mb.relu(x=layer(x))
        total = mb.reduce_sum(x=mb.cast(x=x, dtype="fp32"), axes=[0, 1, 2], keep_dims=False)
        chosen = mb.cond(pred=mb.greater(x=total, y=np.float32(0)), _true_fn=lambda: layer(first),
                         _false_fn=lambda: layer(first), name="chosen")
        return [chosen, layer(first, name="y")]

    built = build_program(body, x=(1, 4, 8))
    before = clone_program(built)
    apply_rewrites(lifting(), built)
    assert not any(trace.fired for trace in apply_rewrites(lifting(), built))
    assert compare_programs(before, built, seeds=4, exactness=Exactness.BITWISE).equal_bits


def test_a_region_is_not_carried_into_rows_of_one_that_take_too_much():
    """Whatever else the preset gains: without a guard, too."""
    built = vocoder.convert_model(kind="bigvgan")._mil_program
    carried, left = clone_program(built), clone_program(built)
    apply_rewrites(lifting({"carry_lift": WHATEVER_IT_TAKES}), carried)
    traces = {trace.rule: trace for trace in apply_rewrites(lifting(), left)}
    said = "padded rows, more than 1.05 MB (most_padded)"
    assert any(said in miss.reason for miss in traces["carry_lift"].near_misses)
    most = [sum(each.padded for each in list_buffers(made)) for made in (carried, left)]
    assert most[1] < most[0]
