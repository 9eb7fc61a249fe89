"""What a rule finds in a program, whichever kind of rule it is."""

from __future__ import annotations

from coremltools.converters.mil.mil import Program

from ..core.contract import Miss, PlanRule, Rule
from ..core.engine import answers, find
from ..core.pass_trace import PassTrace, note
from ..core.ranges import Measure
from ..residency import predict

__all__ = ["found_by", "reasons_of"]


def found_by(rule: Rule, program: Program, measure: Measure | None = None) -> PassTrace:
    """As `find`; a rule about plans is asked about the program's, in which no other rule refuses anything."""
    if not isinstance(rule, PlanRule):
        return find(rule, program, measure=measure)
    trace = PassTrace(rule.name)
    for item in predict(program, [rule])[1]:
        note(trace, rule, item.function, item.answer)
    return trace


def reasons_of(rule: Rule, program: Program, measure: Measure | None = None) -> list[str]:
    """Why the rule does not apply where it was asked, near misses and others."""
    if isinstance(rule, PlanRule):
        given = [item.answer for item in predict(program, [rule])[1]]
    else:
        given = [answer for _, answer in answers(rule, program, measure=measure)]
    return [answer.reason for answer in given if isinstance(answer, Miss)]
