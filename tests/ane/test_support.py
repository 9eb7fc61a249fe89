"""What is accepted where, and how the answer is said."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder, Function, Program, types

from mil_ane_passes.ane import predict_plan
from mil_ane_passes.ane.op_support import find_evidence, find_observations
from mil_ane_passes.ane.support import determine_support
from mil_ane_passes.passes.contract import Hit, Rule
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.passes.targets import GENERATIONS, parse_target


def an_op(kind="relu"):
    built = build_program(lambda x: getattr(Builder, kind)(x=x, name="y"), x=(1, 2))
    return next(op for op in built.functions["main"].operations if op.op_type == kind)


def answer(kind, target, refusals=()):
    return determine_support(an_op(kind), refusals, parse_target(target))


@pytest.mark.parametrize(("kind", "target", "ane", "takes", "words"), [
    ("relu", "m4", "yes", True, "relu: seen on M4"),
    ("relu", "m1", "unknown", True,
     "relu: seen without Core ML on M1; not measured through Core ML on M1 (predicted: supported)"),
    ("relu", "a18", "unknown", True,
     "relu: seen on M4 and without Core ML on M1, M2, M5 and M6; not measured on A18 (predicted: supported)"),
    ("sin", "m4", "yes", True, "sin: seen on M4"),
    ("sin", "m3", "unknown", True,
     "sin: seen on M4 and without Core ML on M5; not measured on M3 (predicted: supported)"),
    ("softmax", "a15", "yes", True, "softmax: seen on A15"),
    ("acos", "m6", "unknown", False, "acos: not measured on M6, and not observed on any ANE"),
])
def test_the_answer_says_where_it_was_seen_and_where_not(kind, target, ane, takes, words):
    told = answer(kind, target)
    assert (told.ane, told.takes, told.reason) == (ane, takes, words)


@pytest.mark.parametrize("kind", ["relu", "conv", "softmax", "gelu", "sin", "acos"])
def test_more_generations_never_make_a_yes_of_what_is_none(kind):
    for number in range(len(GENERATIONS)):
        alone = all(find_evidence(kind, generation) for generation in GENERATIONS[number:])
        assert alone == set(GENERATIONS[number:]).issubset(find_observations(kind))
    assert determine_support(an_op("relu"), [], GENERATIONS).ane == "unknown"


@pytest.mark.parametrize(("dtype", "body", "ane"), [
    ("fp32", lambda x: Builder.cast(x=x, dtype="fp16"), "yes"),
    ("bool", lambda x: Builder.cast(x=x, dtype="fp16"), "yes"),
    ("fp32", lambda x: Builder.cast(x=x, dtype="bool"), "unknown"),
    ("fp16", lambda x: Builder.quantize(input=x, scale=np.float16(1), output_dtype="int8"), "yes"),
    ("fp16", lambda x: Builder.quantize(input=x, scale=np.float16(1), output_dtype="uint8"), "unknown"),
    ("fp16", lambda x: Builder.greater(x=x, y=np.float16(0)), "yes"),
    ("fp16", lambda x: Builder.select(cond=np.array(True), a=x, b=x), "yes"),
    ("bool", lambda x: Builder.select(cond=x, a=x, b=x), "unknown"),
    ("int16", lambda x: Builder.squeeze(x=x), "yes"),
    ("int16", lambda x: Builder.reshape(x=x, shape=[-1]), "unknown"),
    ("bool", lambda x: Builder.identity(x=x), "unknown"),
    ("fp16", lambda x: Builder.gather(x=x, indices=np.array([0], np.uint16), axis=0), "yes"),
    ("fp16", lambda x: Builder.gather(x=x, indices=np.array([0], np.int32), axis=0), "unknown"),
    ("fp16", lambda x: Builder.gather_nd(x=x, indices=np.array([[0]], np.int16)), "yes"),
    ("uint8", lambda x: Builder.gather(x=x, indices=np.array([0], np.uint16), axis=0), "unknown"),
    ("fp16", lambda x: Builder.topk(x=x, k=1, output_indices_dtype="uint16"), "yes"),
    ("int32", lambda x: Builder.topk(x=x, k=1, output_indices_dtype="uint16"), "no"),
])
def test_what_was_seen_holds_for_the_types_that_it_was_seen_with(dtype, body, ane):
    built = mb_program(body, getattr(types, dtype))
    assert [
        row.ane for row in predict_plan(built, [rule() for rule in get_all_rules().values()], target="m4")[0].rows
    ] == [ane]


def mb_program(body, dtype):
    with Function({"x": Builder.placeholder(shape=(1, 4), dtype=dtype)}, opset_version=ct.target.iOS18) as function:
        made = body(function.inputs["x"])
        function.set_outputs(list(made) if isinstance(made, (list, tuple)) else [made])
    built = Program()
    built.add_function("main", function)
    return built


@pytest.mark.parametrize("target", ["m4", "all"])
def test_an_op_inside_control_flow_is_never_said_to_be_taken(target):
    built = mb_program(lambda x: Builder.cond(
        pred=Builder.greater(x=Builder.reduce_max(x=x, keep_dims=False), y=np.float16(0)),
        _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.sqrt(x=x)), types.fp16)
    inside = [row for row in predict_plan(built, [], target=target)[0].rows if row.depth]
    assert [(row.ane, row.takes, row.backend) for row in inside] == [("unknown", False, "cpu")] * 2


def test_a_shape_that_depends_on_values_was_not_measured():
    rules = [rule() for rule in get_all_rules().values()]
    found = mb_program(lambda x: Builder.relu(x=Builder.cast(x=Builder.non_zero(x=x), dtype="fp16")), types.fp16)
    row = predict_plan(found, rules, target="m4")[0].rows[-1]
    assert (row.op.op_type, row.ane, row.takes) == ("relu", "unknown", False)
    flexible = build_program(lambda x: Builder.relu(x=x, name="y"), x=(None, 4))
    assert predict_plan(flexible, rules, target="m4")[0].rows[-1].ane == "yes", "its default shape is fixed"


class Refuses(Rule):
    """For tests: a rule that rejects."""

    refuses = True


def test_a_refusal_goes_before_what_was_seen_and_a_sure_one_before_one_that_is_not():
    op = an_op()
    sure, unsure = (Refuses(), Hit(op, note="too wide")), (Refuses(), Hit(op, note="perhaps", sure=False))
    assert answer("relu", "m4", [unsure]).ane == "unknown"
    told = answer("relu", "m4", [unsure, sure])
    assert (told.ane, told.takes, told.reason) == ("no", False, "too wide")


def test_a_stored_weight_is_no_question():
    built = build_program(lambda x: Builder.add(x=x, y=Builder.constexpr_affine_dequantize(
        quantized_data=np.ones((1, 2), np.int8), zero_point=np.int8(0), scale=np.float16(1), axis=0)), x=(1, 2))
    op = next(op for op in built.functions["main"].operations if op.op_type == "constexpr_affine_dequantize")
    assert determine_support(op, [], GENERATIONS).ane == "yes"


def test_every_source_of_an_acceptance_is_named():
    seen = [
        one
        for kind in ("conv", "relu", "mul", "read_state", "softmax", "atan")
        for one in find_observations(kind).values()
    ]
    assert seen and all(one.evidence.source and one.evidence.chip and one.chip for one in seen)
