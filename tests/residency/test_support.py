"""What is accepted where, and how the answer is said."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder

from mil_ane_passes.core.contract import Hit, Rule
from mil_ane_passes.core.examples import program
from mil_ane_passes.core.targets import GENERATIONS, parse_target
from mil_ane_passes.residency.accepted import accepted, seen_on
from mil_ane_passes.residency.support import support


def an_op(kind="relu"):
    built = program(lambda x: getattr(Builder, kind)(x=x, name="y"), x=(1, 2))
    return next(op for op in built.functions["main"].operations if op.op_type == kind)


def answer(kind, target, refusals=()):
    return support(an_op(kind), refusals, parse_target(target))


@pytest.mark.parametrize(("kind", "target", "ane", "takes", "words"), [
    ("relu", "m4", "yes", True, "relu: seen on M4"),
    ("relu", "m1", "yes", True, "relu: seen by a private route on M1"),
    ("sin", "m4", "yes", True, "sin: seen on M4"),
    ("sin", "m3", "unknown", True,
     "sin: seen on M4 and by a private route on M5; not measured on M3 (predicted: taken)"),
    ("softmax", "a15", "yes", True, "softmax: seen on A15"),
    ("acos", "m6", "unknown", False, "acos: not measured on M6, and not known to have been seen on any ANE"),
])
def test_the_answer_says_where_it_was_seen_and_where_not(kind, target, ane, takes, words):
    told = answer(kind, target)
    assert (told.ane, told.takes, told.reason) == (ane, takes, words)


@pytest.mark.parametrize("kind", ["relu", "conv", "softmax", "gelu", "sin", "acos"])
def test_more_generations_never_make_a_yes_of_what_is_none(kind):
    for number in range(len(GENERATIONS)):
        alone = all(accepted(kind, generation) for generation in GENERATIONS[number:])
        assert alone == set(GENERATIONS[number:]).issubset(seen_on(kind))
    assert support(an_op("relu"), [], GENERATIONS).ane == "unknown"


class Refuses(Rule):
    """For tests: a rule that refuses."""

    refuses = True


def test_a_refusal_goes_before_what_was_seen_and_a_sure_one_before_one_that_is_not():
    op = an_op()
    sure, unsure = (Refuses(), Hit(op, note="too wide")), (Refuses(), Hit(op, note="perhaps", sure=False))
    assert answer("relu", "m4", [unsure]).ane == "unknown"
    told = answer("relu", "m4", [unsure, sure])
    assert (told.ane, told.takes, told.reason) == ("no", False, "too wide")


def test_a_stored_weight_is_no_question():
    built = program(lambda x: Builder.add(x=x, y=Builder.constexpr_affine_dequantize(
        quantized_data=np.ones((1, 2), np.int8), zero_point=np.int8(0), scale=np.float16(1), axis=0)), x=(1, 2))
    op = next(op for op in built.functions["main"].operations if op.op_type == "constexpr_affine_dequantize")
    assert support(op, [], GENERATIONS).ane == "yes"


def test_every_source_of_an_acceptance_is_named():
    seen = [one for kind in ("conv", "relu", "mul", "read_state", "softmax", "atan") for one in seen_on(kind).values()]
    assert seen and all(one.evidence.source and one.evidence.chip and one.chip for one in seen)
