"""An equivalence check covers what it ran: blocks nobody entered, shapes the model does not take, ends of ranges."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.passes.contract import Community, Exactness, Hit, Miss, Rewrite
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from tests.conversions import save_program


class DropBias(Rewrite):
    """A wrong rewrite that says it is right."""

    name, code, slug, roots = "drop_bias", "X9", "x", ("conv_transpose",)
    evidence = (Community("none", source="none"),)

    def match(self, op):
        return Hit(op) if op.bias is not None else Miss(op, "no bias")

    def rewrite(self, hit, mb):
        return mb.conv_transpose(**{name: var for name, var in hit.op.inputs.items() if name != "bias"})


def layer(x):
    return mb.conv_transpose(x=x, weight=make_weight(4, 2, 3), bias=np.array([0.5, -1.0], np.float16))


def plain(x):
    return mb.conv_transpose(x=x, weight=make_weight(4, 2, 3))


def conditional(test):
    """The layer in one branch of a cond, `test` says when."""
    return build_program(
        lambda x: mb.cond(pred=test(x), _true_fn=lambda: layer(x), _false_fn=lambda: plain(x), name="y"), x=(1, 4, 8)
    )


def total_above(limit):
    return lambda x: mb.greater(x=mb.reduce_sum(x=mb.cast(x=x, dtype="fp32"), axes=[0, 1, 2], keep_dims=False),
                                y=np.float32(limit))


def verdict(built, seeds=3):
    before = built()
    after = built()
    apply_rewrite(DropBias(), after)
    return compare_programs(before, after, seeds=seeds, exactness=Exactness.BITWISE)


def test_a_branch_that_no_draw_entered_is_not_proved():
    report = verdict(lambda: conditional(total_above(1e6)))
    assert report.status == "not verified"
    assert report.reason == ("no run entered main > block 0 of cond 'y', in which the programs differ; feeds= compares "
                             "on values that enter it")


def test_a_branch_that_a_draw_entered_is_judged():
    assert verdict(lambda: conditional(total_above(-1e6))).status == "different"


def test_a_flag_that_is_an_input_is_drawn_both_ways():
    def built():
        from coremltools.converters.mil.mil import Function, Program

        inputs = {"x": mb.placeholder(shape=(1, 4, 8), dtype=types.fp16),
                  "flag": mb.placeholder(shape=(1,), dtype=types.bool)}
        with Function(inputs, opset_version=ct.target.iOS17) as function:
            x, flag = function.inputs["x"], mb.squeeze(x=function.inputs["flag"])
            function.set_outputs([mb.cond(pred=flag, _true_fn=lambda: layer(x), _false_fn=lambda: plain(x), name="y")])
        made = Program()
        made.add_function("main", function)
        return made

    assert verdict(built).status == "different"


def test_a_loop_that_no_draw_entered_is_not_proved():
    def built():
        def body(x):
            return mb.while_loop(
                _cond=lambda n, v: mb.less(x=n, y=np.int32(0)),
                _body=lambda n, v: (mb.add(x=n, y=np.int32(1)), mb.slice_by_index(
                    x=mb.concat(values=[layer(v)] * 2, axis=1), begin=[0, 0, 0], end=[1, 4, 8])),
                loop_vars=(mb.const(val=np.int32(0)), x), name="loop")[1]

        return build_program(body, x=(1, 4, 8))

    assert "block 1 of while_loop" in verdict(built).reason


@pytest.mark.parametrize("test", [
    lambda x: mb.equal(x=mb.reduce_max(x=mb.abs(x=x), keep_dims=False), y=np.float16(0)),
    lambda x: mb.logical_not(x=mb.cast(x=mb.reduce_sum(x=mb.abs(x=x), keep_dims=False), dtype="bool")),
], ids=["equal", "bool"])
def test_the_branch_of_zeros_is_entered(test):
    """A branch of a NeuralNetwork tests whether an input is 0."""
    assert verdict(lambda: conditional(test)).status == "different"
    built = conditional(test)
    report = compare_programs(built, conditional(test))
    assert report.equal and "zeros" in str(report)


def test_an_unchanged_branch_need_not_be_entered():
    built = conditional(total_above(1e6))
    assert compare_programs(built, built).equal


def undefined(values):
    """A program whose first output is NaN whatever is fed: the root of a negative number times `values`."""

    def body(x):
        root = mb.sqrt(x=mb.sub(x=mb.clip(x=x, alpha=np.float16(-9), beta=np.float16(9)), y=np.float16(1000)))
        return mb.mul(x=root, y=values(x), name="y"), mb.relu(x=x, name="z")

    return build_program(body, x=(2, 6))


def test_outputs_that_are_nan_throughout_prove_nothing():
    report = compare_programs(undefined(lambda x: mb.cumsum(x=x, axis=1)), undefined(lambda x: x))
    assert report.status == "not verified"
    assert report.reason.startswith("every element of the output 'y' of function 'main' was NaN in all runs")


def test_programs_alike_are_equal_where_they_give_nan():
    assert compare_programs(undefined(lambda x: x), undefined(lambda x: x)).equal


def test_a_rewrite_that_gives_nan_throughout_is_not_written(tmp_path):
    source = tmp_path / "in.mlpackage"
    save_program(undefined(lambda x: mb.cumsum(x=x, axis=1)), source)
    for asked in ({"preset": "full"}, {"passes": "triangle_cumsum"}):
        report = ane.rewrite(source, tmp_path / "out.mlpackage", **asked)
        assert report.status == "not verified" and "NaN in all runs" in str(report)
        assert not (tmp_path / "out.mlpackage").exists()


def overflowing(addend):
    """A program that gives infinity whatever is fed."""
    return build_program(
        lambda x: mb.exp(x=mb.add(x=mb.cast(x=x, dtype="fp32"), y=np.float32(addend)), name="y"), x=(1, 4)
    )


def test_outputs_that_are_infinite_throughout_prove_nothing():
    finite = build_program(lambda x: mb.relu(x=mb.cast(x=x, dtype="fp32"), name="y"), x=(1, 4))
    for after, how in ((overflowing(2e5), {}), (overflowing(2e5), {"snr": 30}), (finite, {"fixes_nonfinite": True})):
        report = ane.verify(overflowing(1e5), after, **how)
        assert report.status == "not verified", how
        assert report.reason.startswith("every element of the output 'y' of function 'main' was NaN or infinite")
    assert ane.verify(overflowing(1e5), overflowing(1e5)).equal


def half_undefined(factor):
    """A program whose output is x beside the logarithm of what is below 0."""
    def body(x):
        x = mb.cast(x=x, dtype="fp32")
        log = mb.log(x=mb.sub(x=mb.clip(x=x, alpha=np.float32(-9), beta=np.float32(9)), y=np.float32(1000)))
        return mb.concat(values=[x, mb.mul(x=log, y=np.float32(factor))], axis=1, name="y")

    return build_program(body, x=(1, 4))


def test_elements_that_are_nan_in_all_runs_are_in_the_notes():
    report = ane.verify(half_undefined(1), half_undefined(2))
    assert report.equal
    assert ("4 of 8 elements were NaN in all runs of the output 'y' of function 'main' and not compared"
            in report.notes)
    assert not ane.verify(half_undefined(1), half_undefined(1)).notes


def test_outputs_that_are_zero_throughout_are_compared():
    def zeros(factor):
        return build_program(lambda x: mb.relu(x=mb.mul(x=mb.exp(x=x), y=np.float16(factor)), name="y"), x=(1, 4))

    assert ane.verify(zeros(-1), zeros(-2)).equal
    assert ane.verify(zeros(-1), zeros(1e-3)).status == "different"


def flexible(kernel, shape, tmp_path):
    import torch

    model = torch.nn.Sequential(torch.nn.Conv1d(4, 4, kernel), torch.nn.ConvTranspose1d(4, 2, 3)).eval()
    path = tmp_path / "in.mlpackage"
    ct.convert(torch.jit.trace(model, torch.zeros(1, 4, 32)), inputs=[ct.TensorType(name="x", shape=shape)],
               skip_model_load=True, minimum_deployment_target=ct.target.iOS17).save(str(path))
    return path


def test_a_declared_shape_that_the_model_does_not_take_is_left_out_and_said(tmp_path):
    path = flexible(7, ct.Shape((1, 4, ct.RangeDim(1, 64, default=32))), tmp_path)
    report = ane.rewrite(path, tmp_path / "out.mlpackage")
    assert report.status == "written" and report.verify.equal_bits
    (note,) = set(report.verify.notes)
    assert note.startswith("main, seed 1, smallest shapes: not compared, as the program before cannot be run (")
    assert note in str(report)


def test_a_shape_that_only_the_program_before_takes_is_a_difference():
    before = build_program(lambda x: mb.relu(x=x, name="y"), x=(1, 4, None))
    after = build_program(lambda x: mb.relu(x=mb.slice_by_index(x=mb.pad(
        x=mb.conv(x=x, weight=np.eye(4, dtype=np.float16)[..., None].repeat(21, 2)), pad=[0, 0, 0, 0, 10, 10],
        constant_val=np.float16(0)), begin=[0, 0, 0], end=[1, 4, 0], end_mask=[False, False, True]), name="y"),
        x=(1, 4, None))
    report = compare_programs(before, after)
    assert report.status == "different" and "the program after cannot be run" in str(report)


def test_where_nothing_can_be_run_nothing_is_proved():
    built = build_program(lambda x: mb.conv(x=x, weight=make_weight(4, 4, 99), name="y"), x=(1, 4, None))
    report = compare_programs(built, built)
    assert report.status == "not verified" and report.reason.startswith("none of the sampled feeds can be run: ")
    assert report.reason.endswith("; pass valid feeds with --feeds of rewrite or verify (feeds= in Python)")


@pytest.mark.parametrize("upper", [4096, 3_000_000])
def test_what_is_wrong_only_at_length_is_found_in_a_long_range(upper, tmp_path):
    before = flexible(3, ct.Shape((1, 4, ct.RangeDim(8, upper, default=32))), tmp_path)
    package = ane.load(before)

    class Longer(DropBias):
        def rewrite(self, hit, mb):
            op = hit.op
            length = mb.gather(x=mb.shape(x=op.x), indices=2, axis=0)
            factor = mb.cast(x=mb.cast(x=mb.less(x=length, y=np.int32(1000)), dtype="int32"), dtype="fp16")
            scaled = mb.mul(x=mb.reshaped(op.bias, (1, 2, 1)), y=factor)
            return mb.add(x=super().rewrite(hit, mb), y=scaled)

    twin = ane.load(before)
    apply_rewrite(Longer(), twin.program)
    report = compare_programs(package.program, twin.program, describe=package.description)
    assert report.status == "different"


def two_functions(added):
    """`main` doubles, `plus` adds `added`."""
    made = build_program(lambda x: mb.mul(x=x, y=np.float16(2), name="y"), x=(3,))
    made.add_function(
        "plus", build_program(lambda x: mb.add(x=x, y=np.float16(added), name="y"), x=(3,)).functions["main"]
    )
    return made


def test_a_function_that_the_given_feeds_do_not_reach_is_not_proved():
    feeds = {"x": np.ones(3, np.float16)}
    report = ane.verify(two_functions(1.0), two_functions(2.0), feeds=feeds)
    assert (report.status, report.reason) == (
        "not verified", "no run entered plus, in which the programs differ")
    assert ane.verify(two_functions(1.0), two_functions(1.0), feeds=feeds).equal
    assert ane.verify(two_functions(1.0), two_functions(2.0)).status == "different"
