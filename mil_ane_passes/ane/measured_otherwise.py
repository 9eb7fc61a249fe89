"""Findings for ops where a user's own measurement contradicts the prediction."""

from __future__ import annotations

from collections.abc import Iterator

from ..passes.contract import Community, Hit, Rule, Severity
from .agreement import Agreement
from .prediction import RuleResult

__all__ = ["MeasuredOtherwise", "iterate_contradictions"]


class MeasuredOtherwise(Rule):
    """Core ML on your machine contradicts the prediction.

    why     The prediction is based on published measurements of some chips and macOS versions; yours may differ.
    when    A measurement is given (lint --measured) in which an op is supported on the ANE although a rule reports it
            as unsupported, or vice versa.
    fix     Trust the measurement for that chip and macOS. A rule named in the finding is wrong there: please report it
            with the result.json.
    """

    name, code, slug = "measured_otherwise", "ANE599", "measured-otherwise"
    confidence, severity = "high", Severity.SUGGESTION
    evidence = (Community("Core ML's result on the user's machine", source="the file given as measured"),)
    advice = "Trust the measurement for that chip and macOS, and report the contradiction."


def iterate_contradictions(found: Agreement) -> Iterator[RuleResult]:
    """Yield one finding for each op for which the measurement contradicts the prediction."""
    for each in found.support:
        codes = f"{', '.join(each.codes)}: " if each.codes else ""
        where = found.match.measurement.where
        note = f"measured {each.theirs} on {where}, predicted {each.ours} ({codes}{each.reason})"
        yield RuleResult(MeasuredOtherwise(), Hit(each.row.op, note=note), each.row.function)
