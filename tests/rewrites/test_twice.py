"""The preset run twice equals the preset run once, on what every rewrite shows as an example."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.forecast import Forecast
from mil_ane_passes.passes.guard import Guard
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from mil_ane_passes.passes.registry import get_all_rewrites, get_all_rules


def guard(target):
    rules = [rule() for rule in get_all_rules().values() if rule.refuses]
    return Guard(lambda each: Forecast.of(predict_plan(each, rules, target=target)[0]))


def fired_again(built, target):
    apply_rewrites(select_rewrites("full"), built, target=target, guard=guard(target))
    again = apply_rewrites(select_rewrites("full"), built, target=target, guard=guard(target))
    return [trace.rule for trace in again if trace.fired]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name, rule in get_all_rewrites().items() if rule.preset != "named"])
def test_examples(name, share):
    """A third of the examples in the fast run; the slow one has all."""
    examples = list(get_all_rewrites()[name]().examples())[::share]
    again = {example.name: fired_again(example.build(), "all") for example in examples}
    assert not any(again.values()), again


def pooled(x):
    x = mb.avg_pool(x=mb.max_pool(x=x, kernel_sizes=[40], strides=[2], pad_type="valid"), kernel_sizes=[40],
                    strides=[3], pad_type="same")
    return mb.pad(x=mb.cumsum(x=x, axis=-1), pad=[0, 0, 0, 0, 7, 8], constant_val=np.float16(1),
                  name="y")


def upsampled(x):
    x = mb.tan(x=mb.max_pool(x=x, kernel_sizes=[13], strides=[3], pad_type="same"))
    x = mb.conv(x=x, weight=make_weight(8, 1, 80), groups=4, pad_type="same")
    return mb.conv_transpose(x=x, weight=make_weight(8, 8, 16), bias=make_weight(8), strides=[2], name="y")


PLACES = {
    "scatter": lambda x, new: mb.scatter(data=x, indices=np.array([3, 0, 2], np.int32), updates=new, axis=0,
                                         mode="update", name="y"),
    "scatter_nd": lambda x, new: mb.scatter_nd(data=x, indices=np.array([[3], [0], [2]], np.int32), updates=new,
                                               mode="update", name="y"),
    "scatter_along_axis": lambda x, new: mb.scatter_along_axis(
        data=x, indices=np.tile(np.array([[3], [0], [2]], np.int32), (1, 6)), updates=new, axis=0, mode="update",
        name="y"),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("rows", ["constant", "computed of constants"])
def test_constant_updates_in_several_pieces(kind, rows):
    new = np.arange(18, dtype=np.float16).reshape(3, 6)

    def body(x):
        return PLACES[kind](mb.mul(x=x, y=np.float16(2)), new if rows == "constant" else mb.concat(
            values=[new[:1], new[1:]], axis=0))

    assert not fired_again(build_program(body, x=(5, 6)), "all")


@pytest.mark.parametrize("batch", [1, 2])
def test_a_gru_from_a_constant_state(batch):
    def body(x):
        return mb.gru(x=x, initial_h=np.full((batch, 8), 0.5, np.float16), weight_ih=make_weight(24, 8),
                      weight_hh=make_weight(24, 8), output_sequence=True, name="y")[0]

    assert not fired_again(build_program(body, x=(3, batch, 8)), "all")


def test_a_gru_whose_first_products_round_is_unrolled():
    built = build_program(
        lambda x: mb.gru(
            x=x,
            initial_h=np.full((2, 8), 0.3, np.float16),
            weight_ih=make_weight(24, 8),
            weight_hh=make_weight(24, 8),
            output_sequence=True,
            name="y",
        )[0],
        x=(3, 2, 8),
    )
    report = ane.rewrite(built, preset="full", target="m4", max_growth=None)
    assert "unroll_gru" in [trace.rule for trace in report.traces if trace.fired], report
    assert not fired_again(built, "m4")


def test_integers_beside_a_lifted_convolution():
    with Function({"z": mb.placeholder(shape=(1, 4, 40), dtype=types.fp16),
                   "x": mb.placeholder(shape=(1, 2, 2), dtype=types.int32)}, opset_version=ct.target.iOS17) as function:
        lifted = mb.relu(x=mb.conv(x=function.inputs["z"], weight=make_weight(6, 4, 16), pad_type="same"), name="a")
        fives = mb.cast(x=mb.mul(x=function.inputs["x"], y=np.int32(5)), dtype="fp16")
        function.set_outputs([lifted, mb.mul(x=fives, y=np.float16(0.5), name="b")])
    built = Program()
    built.add_function("main", function)
    assert not fired_again(built, "m4")
    assert [op.op_type for _, op in iterate_ops(built) if op.op_type != "const"][:2] == ["mul", "cast"]


@pytest.mark.parametrize(("body", "target"), [(pooled, "all"), (upsampled, "m4")])
def test_what_a_guard_weighs_against_each_other(body, target):
    assert not fired_again(build_program(body, x=(1, 4, 300)), target)
