"""The table of op types: what it states of each, and that rules report exactly that."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from mil_ane_passes.ane.op_support import (
    _ROWS,
    OP_SUPPORT,
    find_evidence,
    find_observations,
    find_problem_rows,
    find_row,
)
from mil_ane_passes.ane.support import determine_support
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Hit
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rule, get_all_rules
from mil_ane_passes.passes.targets import GENERATIONS

PROBLEMS = sorted({row.problem.code for row in OP_SUPPORT.values() if row.problem is not None})


def draw(x, kind):
    parameters = {"random_bernoulli": {"shape": [2], "prob": np.float16(0.5)}, "random_categorical": {"x": x}}
    return getattr(Builder, kind)(**parameters[kind], seed=1, name="y")


def transform(x):
    return Builder.affine(
        x=x, transform_matrix=np.array([[1, 0, 0, 0, 1, 0]], np.float16), output_height=4, output_width=4,
        sampling_mode="bilinear", padding_mode="constant", padding_value=np.float16(0),
        coordinates_mode="normalized_minus_one_to_one", align_corners=True, name="y")


def use_list(x):
    made = Builder.make_list(init_length=2, dynamic_length=False, elem_shape=(3,), dtype="fp16")
    made = Builder.list_scatter(ls=made, indices=np.array([1, 0], np.int32), value=x)
    made = Builder.list_write(ls=made, index=np.int32(0), value=Builder.list_read(ls=made, index=np.int32(1)))
    return Builder.list_gather(ls=made, indices=np.array([0, 1], np.int32)), Builder.list_length(ls=made)


LIST_OPS = ("make_list", "list_gather", "list_length", "list_read", "list_scatter", "list_write")
WITHOUT_EXAMPLE = {
    **dict.fromkeys(LIST_OPS, lambda: build_program(use_list, x=(2, 3))),
    "random_bernoulli": lambda: build_program(lambda x: draw(x, "random_bernoulli"), x=(2,)),
    "random_categorical": lambda: build_program(lambda x: draw(x, "random_categorical"), x=(2, 3)),
    "affine": lambda: build_program(transform, x=(1, 2, 4, 4)),
}


def find_example_op(rule, op_type):
    """An op of that type in the examples of `rule`, or in a program above, of a form that the rule reports."""
    builders = [each.build for each in rule().examples() if each.reason is None]
    for build in [*builders, *([WITHOUT_EXAMPLE[op_type]] if op_type in WITHOUT_EXAMPLE else [])]:
        program = build()
        for _, op in iterate_ops(program):
            if op.op_type == op_type and (row := find_row(op_type)) and not (row.excludes and row.excludes(op)):
                return program, op
    raise AssertionError(f"{rule.name} has no example with {op_type}")


@pytest.mark.parametrize("row", OP_SUPPORT.values(), ids=lambda row: row.op)
def test_a_row_is_reported_on_each_generation_as_it_states(row):
    """Unsupported where a source says so, not known where sources disagree or nobody measured it, else no finding."""
    assert row.op in {**SSAOpRegistry.core_ops, **SSAOpRegistry.dialect_ops}, f"coremltools has no op {row.op!r}"
    assert list(find_observations(row.op)) == [each for each in GENERATIONS if find_evidence(row.op, each)]
    assert all(each.evidence.source and each.generation for each in row.supported)
    if row.problem is None:
        assert not (row.unsupported or row.disputed or row.disputed_note) and (row.supported or row.sources)
        return
    rule = find_rule(row.problem.code)
    program, op = find_example_op(rule, row.op)
    looked_at = [each for each in GENERATIONS if rule.targets.includes(each)]
    for generation in looked_at:
        asked = rule()
        asked._generations = (generation,)
        answer = asked.match(op)
        unsupported = any(gate.includes(generation) for gate in row.unsupported)
        disputed = any(gate.includes(generation) for gate in row.disputed)
        assert not (unsupported and disputed) and (not disputed or row.disputed_note)
        if unsupported or disputed or not row.supported:
            assert isinstance(answer, Hit) and answer.sure == unsupported, (generation, answer)
            assert row.op in answer.note or "reflecting pad" in answer.note
            assert "{" not in answer.note and answer.message == (
                row.find_message(op) if unsupported and "m4" in generation.chips else None)
            support = determine_support(op, [(asked, answer)], (generation,))
            assert (support.ane, support.reason) == ("no" if unsupported else "unknown", answer.note)
        else:
            assert not isinstance(answer, Hit), (generation, answer)
            assert determine_support(op, [], (generation,)).ane in ("yes", "unknown")
    assert program


@pytest.mark.parametrize("code", PROBLEMS)
def test_the_rows_of_a_code_are_one_rule(code):
    rule, rows = find_rule(code), find_problem_rows(code)
    (problem,) = {row.problem for row in rows}
    assert rule.refuses and rule.roots == tuple(row.op for row in rows)
    assert (rule.advice, rule.evidence) == (problem.advice, problem.evidence)
    for generation in {each for row in rows for gate in (*row.unsupported, *row.disputed) for each in gate.generations}:
        assert rule.targets.includes(generation)


def test_each_op_type_has_one_row_and_no_supported_one_is_unsupported_there():
    several = sorted({row.op for row in _ROWS if sum(other.op == row.op for other in _ROWS) > 1})
    assert not several, f"two rows of {several}; merge them"
    for row in OP_SUPPORT.values():
        through_core_ml = {each.generation for each in row.supported if not each.without_core_ml}
        assert not through_core_ml & {each for gate in row.unsupported for each in gate.generations}, row.op
    assert len(PROBLEMS) >= 13 and {"cumsum", "scatter", "sliding_windows"} <= {
        rule.name for rule in get_all_rules().values() if rule.code in PROBLEMS}


def test_a_type_without_a_row_is_unmeasured():
    empty = find_row("an_op_of_tomorrow")
    assert not empty.supported and not empty.unsupported and empty.problem is None
    assert find_observations("an_op_of_tomorrow") == {}
