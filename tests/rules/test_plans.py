"""Rules about where a model goes back and forth, on plans whose costs are given."""

from __future__ import annotations

import pytest
from coremltools.converters.mil.mil import Builder, Program, types

from mil_ane_passes.ane import predict_plan
from mil_ane_passes.ane.partitions import find_cpu_partitions, find_stranded_ops, iterate_rows_by_function
from mil_ane_passes.passes.contract import PlanRule
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.plan import Plan
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.passes.targets import GENERATIONS
from tests.rules.plans import chained, found, places, planned

NO = None
EDGE, MIDDLE, END = 0.25, 0.375, 0.375


@pytest.mark.parametrize("costs,placed", [
    ((1, NO, 0.37, NO, 1), "ACCCA"), ((1, NO, 0.38, NO, 1), "ACACA"), ((0.24, NO, 1), "CCA"), ((0.26, NO, 1), "ACA"),
    ((1, NO, 0.37), "ACC"), ((1, NO, 0.38), "ACA"), ((0.24,), "C"), ((0.26,), "A"),
], ids=str)
def test_the_thresholds_are_those_of_the_cost_model(costs, placed):
    """0.375 ms between two unsupported ops, 0.25 ms at the start; at the end the output costs as well."""
    assert places(planned(*costs)) == placed


@pytest.mark.parametrize("costs,needs", [
    ((1, NO, 0.37, NO, 1), MIDDLE), ((0.24, NO, 1), EDGE), ((1, NO, 0.37), END), ((0.24,), EDGE),
], ids=str)
def test_what_a_stretch_needs_is_what_the_partition_charges(costs, needs):
    plan = planned(*costs)
    ends = frozenset(plan.program.functions["main"].outputs)
    (stretch,) = find_stranded_ops(plan.rows, ends)
    assert stretch.needs == pytest.approx(needs) and stretch.saved_ms < stretch.needs
    assert stretch.saved_ms == pytest.approx(next(cost for cost in costs if cost not in (NO, 1)))


def test_beside_the_ane_a_stretch_needs_its_output_only():
    plan = planned(1, 1, -0.01)
    assert places(plan) == "AAC"
    (stretch,) = find_stranded_ops(plan.rows, frozenset(plan.program.functions["main"].outputs))
    assert stretch.needs == pytest.approx(0.0), "no change any more, but an output"
    between = planned(1, -0.5, 1)
    assert places(between) == "ACA" and find_stranded_ops(between.rows)[0].needs == pytest.approx(-0.375)


def test_islands_say_who_is_refused_and_who_is_dragged_along():
    plan = planned(1, NO, 0.1, NO, 1, NO)
    ((_, rows),) = iterate_rows_by_function(plan)
    middle, end = find_cpu_partitions(rows)
    assert [row.op.name for row in middle.refused] == ["op1", "op3"]
    assert [row.op.name for row in middle.stranded] == ["op2"]
    assert middle.inner and end.last and not end.inner and not end.stranded
    assert middle.milliseconds == pytest.approx(30)


def test_what_is_nested_in_a_refused_op_is_no_cause():
    def body(x):
        return Builder.cond(pred=Builder.greater(x=Builder.reduce_max(x=x, keep_dims=False), y=0.0, name="asked"),
                            _true_fn=lambda: Builder.cumsum(x=x, axis=0), _false_fn=lambda: Builder.tanh(x=x), name="y")

    plan, _ = predict_plan(build_program(body, dtype=types.fp32, x=(2, 3)), [])
    ((_, rows),) = iterate_rows_by_function(plan)
    (island,) = find_cpu_partitions(rows)
    assert {row.op.op_type for row in island.rows} >= {"cond", "cumsum", "tanh"}
    assert not {row.op.op_type for row in (*island.refused, *island.stranded)} & {"cumsum", "tanh"}


def test_small_segments_are_named_with_what_they_save_and_need():
    (hit,) = found("small_segment", planned(1, NO, 0.1, 0.1, NO, 0.05, NO, 1))
    assert hit.op.name == "op2" and [op.name for op in hit.covers] == ["op2", "op3", "op5"]
    assert "2 ops from %op2 to %op3, which would save 0.2 ms, with a transfer overhead of 0.375 ms" in hit.note
    assert "1 op, %op5, which would save 0.05 ms" in hit.note
    assert [op.name for op in found("small_segment", planned(1, NO, 0.1, NO, 0.1, 0.1, NO, 1), least=2)[0].covers] == \
        ["op4", "op5"]


def test_at_most_three_small_segments_are_spelt_out():
    (hit,) = found("small_segment", planned(1, *(NO, 0.1) * 6, NO, 1))
    assert hit.note.count("would save") == 3 and hit.note.endswith("and 3 partitions more") and len(hit.covers) == 6


@pytest.mark.parametrize("costs", [(1, NO, 1), (0.01, NO, 0.01), (NO,), (1,)], ids=str)
def test_no_small_segment(costs):
    assert not found("small_segment", planned(*costs))


def test_a_late_departure_names_where_to_cut():
    (hit,) = found("late_departure", planned(1, 1, 1, 1, NO, 0.1, 0.1, NO))
    assert hit.op.name == "op4" and len(hit.covers) == 4
    assert hit.note == ("the last 4 of 8 ops are predicted on the CPU (40 ms), because of 2 tanh, 2 supported "
                        "ops among them; split at %op3: 4 ops before, 4 of them predicted on the ANE, 4 after")
    assert hit.split_at == (("op3",),)


def test_a_departure_that_reads_nothing_of_what_is_before_has_no_cut():
    def body(x, y):
        one = Builder.exp(x=Builder.tanh(x=x, name="op0"), name="op1")
        return one, Builder.cumsum(x=y, axis=1, name="apart")

    plan = planned(1, 1, NO, built=build_program(body, x=(1, 8), y=(1, 8)))
    (hit,) = found("late_departure", plan)
    assert places(plan) == "AAC" and hit.op.name == "apart" and not hit.split_at
    assert "because of 1 cumsum; no value crosses: 2 ops before" in hit.note


def test_a_cut_that_takes_ops_off_the_ane_is_not_advised():
    """Two values cross, and each is an output that costs 0.125 ms on the ANE, more than the ops save there."""
    def body(x):
        one = Builder.tanh(x=x, name="one")
        two = Builder.exp(x=one, name="two")
        return Builder.mul(x=Builder.cumsum(x=two, axis=1, name="sum"), y=one, name="y")

    plan = planned(0.15, 0.15, NO, 0.01, built=build_program(body, x=(1, 8)))
    assert places(plan) == "AACC"
    (miss,) = get_all_rules()["late_departure"]().match_plan(plan)
    assert miss.near and miss.reason == (
        "of the 2 ops before the last transition to the CPU 2 are predicted on the ANE, and 0 in a separate model"
    )



def test_a_cut_through_several_values_names_each():
    def body(x):
        one, two = Builder.tanh(x=x, name="one"), Builder.exp(x=x, name="two")
        joined = Builder.add(x=one, y=two, name="joined")
        last = Builder.mul(x=Builder.cumsum(x=joined, axis=1, name="sum"), y=one, name="mul")
        return Builder.sub(x=last, y=x, name="y")

    plan = planned(1, 1, 1, NO, 0.01, 0.01, built=build_program(body, x=(1, 8)))
    (hit,) = found("late_departure", plan)
    assert "split at %joined, %one:" in hit.note, "not the model's own input, which both parts have"


@pytest.mark.parametrize("costs", [(1, NO, 1), (NO, 1), (NO, 0.1, NO), (1, 1, 0.01), (1, NO, NO, NO)], ids=str)
def test_no_late_departure(costs):
    assert not found("late_departure", planned(*costs))


def test_ping_pong_counts_changes_and_their_cost_worst_first():
    plan = planned(1, NO, 1, NO, 0.1, NO, 1)
    assert places(plan) == "ACACCCA"
    (hit,) = found("ping_pong", plan)
    assert hit.note == ("4 transitions and 3 entries into the ANE cost 0.875 ms; 2 CPU partitions: 2 tanh at %op3 "
                        "(1 stranded op, 30.4 ms), 1 tanh at %op1 (10.4 ms)")
    assert [op.name for op in hit.covers] == ["op3", "op5", "op1"], "the unsupported ops, not the stranded ones"
    assert not found("ping_pong", plan, changes=5) and found("ping_pong", planned(1, NO, 1), changes=2)


def test_changes_agree_with_the_segments():
    for costs in ((1, NO) * 5, (NO, 1) * 5, (NO, 0.1, 1, NO, 1) * 3):
        plan = planned(*costs)
        (hit,) = found("ping_pong", plan)
        assert hit.note.startswith(f"{len(plan.segments) - 1} transitions")
        entries = sum(segment.backend == "ane" for segment in plan.segments)
        assert f"{entries} entries" in hit.note


def test_a_model_all_on_the_cpu_says_which_stretch_decides():
    (hit,) = found("cpu_share", planned(0.1, NO, 0.2, 0.1, NO, 0.1))
    assert "4 of 6 ops are supported" in hit.note
    assert "2 ops from %op2 to %op3, would save 0.3 ms, with a transfer overhead of 0.375 ms" in hit.note
    assert hit.note.endswith("2 ops unsupported on the ANE limit it (2 tanh)") and len(hit.covers) == 6
    (hit,) = found("cpu_share", planned(0.1, 0.1))
    assert hit.note.endswith("all ops are supported, the model is too small for the ANE")


@pytest.mark.parametrize("costs", [(1, NO, 0.1), (NO, NO, 0.1), (NO,)], ids=str)
def test_not_all_on_the_cpu_or_mostly_refused(costs):
    assert not found("cpu_share", planned(*costs))


def test_only_one_rule_speaks_of_a_model_that_is_all_on_the_cpu():
    plan = planned(0.1, NO, 0.1, NO, 0.1)
    assert [name for name in ("small_segment", "late_departure", "ping_pong", "cpu_share") if found(name, plan)] == \
        ["cpu_share"]


def topk(x, name):
    return Builder.topk(x=x, k=4, axis=1, name=name)[0]


@pytest.mark.parametrize("costs,fires", [
    ((1, 1, 1), True), ((1, NO, 1), True), ((NO, 1, 1), False), ((1, 1, NO), False), ((0.01, 0.01, 0.01), False),
], ids=str)
def test_topk_between_parts_on_the_ane(costs, fires):
    def body(x):
        return Builder.tanh(x=topk(Builder.tanh(x=x, name="first"), "ranked"), name="last")

    hits = found("topk_in_the_middle", planned(*costs, built=build_program(body, x=(1, 8, 4))))
    assert bool(hits) is fires and all(hit.op.op_type == "topk" for hit in hits)
    assert not fires or ("ANE" if costs[1] else "CPU") + ", between" in hits[0].note


def plan_rules():
    return [name for name, rule in get_all_rules().items() if issubclass(rule, PlanRule)]


@pytest.mark.parametrize("name", plan_rules())
def test_nothing_to_plan(name):
    """No function, a function without ops, ops without a package."""
    rule = get_all_rules()[name]()
    assert not list(rule.match_plan(Plan(Program(), GENERATIONS, [], [])))
    plan, answers = predict_plan(build_program(lambda x: x, x=(2, 3)), [rule])
    assert not plan.rows and not answers


def test_each_function_is_asked_by_itself():
    built = chained(5)
    built.add_function("other", chained(5).functions["main"])
    for row_name in ("small_segment", "late_departure", "cpu_share"):
        _, answers = predict_plan(built, [get_all_rules()[row_name]()])
        assert {item.function for item in answers} in ({"main", "other"}, set())
    assert {item.function for item in predict_plan(built, [get_all_rules()["cpu_share"]()])[1]} == {"main", "other"}
