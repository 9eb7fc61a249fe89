"""Matching of a rule of any kind on a program."""

from __future__ import annotations

from coremltools.converters.mil.mil import Program

from ..ir.value_ranges import Measure
from ..passes.contract import Miss, PlanRule, Rule
from ..passes.engine import find_matches, iterate_hits_and_misses
from ..passes.pass_trace import PassTrace, record_result
from ..residency import predict_plan

__all__ = ["collect_miss_reasons", "find_rule_matches"]


def find_rule_matches(rule: Rule, program: Program, measure: Measure | None = None) -> PassTrace:
    """Find matches as `find_matches` does; a plan rule is matched on a plan predicted without any other rule."""
    if not isinstance(rule, PlanRule):
        return find_matches(rule, program, measure=measure)
    trace = PassTrace(rule.name)
    for item in predict_plan(program, [rule])[1]:
        record_result(trace, rule, item.function, item.answer)
    return trace


def collect_miss_reasons(rule: Rule, program: Program, measure: Measure | None = None) -> list[str]:
    """Collect the reasons why the rule does not match, of near misses and others."""
    if isinstance(rule, PlanRule):
        given = [item.answer for item in predict_plan(program, [rule])[1]]
    else:
        given = [answer for _, answer in iterate_hits_and_misses(rule, program, measure=measure)]
    return [answer.reason for answer in given if isinstance(answer, Miss)]
