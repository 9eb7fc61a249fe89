"""No rule fails because of what stands beside the ops it looks at. The default run has a sample (`testing.checks`)."""

from __future__ import annotations

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.core.contract import PlanRule
from mil_ane_passes.core.examples import program
from mil_ane_passes.core.registry import all_rules
from mil_ane_passes.residency import predict
from mil_ane_passes.testing.checks import neighbour_failures
from mil_ane_passes.testing.finding import found_by
from mil_ane_passes.testing.neighbours import (
    INPUT,
    Neighbours,
    forget_failed,
    op_types,
    representative_op_types,
)

SHAPES = ((2, 4, 4, 4), (2, 3, 8), (1, 4, 2), (4,), (2, 3), (4, 4, 1))
NEVER = {"constexpr_lut_to_sparse", "constexpr_sparse_blockwise_shift_scale", "constexpr_sparse_to_dense", "non_zero",
         "non_maximum_suppression"}
"Made of other compressed weights, of a type or shape that is not tried, or of a size that a run decides."


def of_every_type(opset):
    """A program with an op of each type in several shapes, and the types it has."""
    built = program(lambda x: mb.relu(x=x), opset=opset, x=(2, 4, 4, 4))
    block = built.functions["main"]
    made = set()
    with block:
        builders = Neighbours(block, None, next(iter(block.inputs.values())))
        for kind in op_types():
            for shape in SHAPES:
                for dtype in (types.fp16, types.fp32, types.int32, types.bool, types.int8):
                    if builders.produce(kind, shape, dtype) is not None:
                        made.add(kind)
                        break
    forget_failed(built)
    return built, made


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18])
def test_every_rule_and_the_prediction_answer_about_every_op_type(opset):
    built, _ = of_every_type(opset)
    rules = [rule() for rule in all_rules().values()]
    predict(built, rules)
    for rule in rules:
        if not isinstance(rule, PlanRule):
            found_by(rule, built)


def test_there_is_a_recipe_for_every_op_type():
    assert set(op_types()) - of_every_type(ct.target.iOS18)[1] <= NEVER
    assert {"select", "concat", "cond"} <= set(op_types()) and len(representative_op_types()) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, rule in all_rules().items() if not issubclass(rule, PlanRule)])
def test_every_op_type_beside_every_example(name):
    found = list(neighbour_failures(all_rules()[name], lambda number: [INPUT, *op_types()]))
    assert not found, "\n".join(dict.fromkeys(found))
