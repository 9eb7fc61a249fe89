"""No rule fails because of what stands beside the ops it looks at. The default run has a sample (`testing.checks`)."""

from __future__ import annotations

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.ane import predict_plan
from mil_ane_passes.passes.contract import PlanRule
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.testing.checks import find_rule_matches, iterate_neighbour_failures
from mil_ane_passes.testing.neighbours import (
    FUNCTION_INPUT,
    NeighbourBuilder,
    list_op_types,
    list_representative_op_types,
    remove_failed_ops,
)

SHAPES = ((2, 4, 4, 4), (2, 3, 8), (1, 4, 2), (4,), (2, 3), (4, 4, 1))
NEVER = {"constexpr_lut_to_sparse", "constexpr_sparse_blockwise_shift_scale", "constexpr_sparse_to_dense", "non_zero",
         "non_maximum_suppression"}
"Made of other compressed weights, of a type or shape that is not tried, or of a size that a run decides."


def of_every_type(opset):
    """A program with an op of each type in several shapes, and the types it has."""
    built = build_program(lambda x: mb.relu(x=x), opset=opset, x=(2, 4, 4, 4))
    block = built.functions["main"]
    made = set()
    with block:
        builders = NeighbourBuilder(block, None, next(iter(block.inputs.values())))
        for kind in list_op_types():
            for shape in SHAPES:
                for dtype in (types.fp16, types.fp32, types.int32, types.bool, types.int8):
                    if builders.build_producer(kind, shape, dtype) is not None:
                        made.add(kind)
                        break
    remove_failed_ops(built)
    return built, made


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS18, *(
    pytest.param(each, marks=pytest.mark.slow) for each in (ct.target.iOS16, ct.target.iOS17))])
def test_every_rule_and_the_prediction_answer_about_every_op_type(opset):
    built, _ = of_every_type(opset)
    rules = [rule() for rule in get_all_rules().values()]
    predict_plan(built, rules)
    for rule in rules:
        if not isinstance(rule, PlanRule):
            find_rule_matches(rule, built)


def test_there_is_a_recipe_for_every_op_type():
    assert set(list_op_types()) - of_every_type(ct.target.iOS18)[1] <= NEVER
    assert {"select", "concat", "cond"} <= set(list_op_types()) and len(list_representative_op_types()) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, rule in get_all_rules().items() if not issubclass(rule, PlanRule)])
def test_every_op_type_beside_every_example(name):
    found = list(iterate_neighbour_failures(get_all_rules()[name], lambda number: [FUNCTION_INPUT, *list_op_types()]))
    assert not found, "\n".join(dict.fromkeys(found))
