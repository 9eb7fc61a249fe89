"""Core ML's measurement on a Mac, encoded for the page beside the prediction."""

from __future__ import annotations

from typing import Any

from ..agreement import iterate_agreement_lines
from ..lint import LintReport

__all__ = ["encode_measurement"]


def encode_measurement(report: LintReport) -> dict[str, Any] | None:
    """Encode where it was measured, the summary, and each op; None without a measurement.

    An op has its row's index, the device that Core ML prefers, whether it is supported on the ANE, and its share of the
    cost.
    """
    if report.measured is None:
        return None
    places = {row.op: place for place, row in enumerate(report.plan.rows)}
    pairs = [(places[row.op], op) for row, op in report.measured.match.pairs if row.op in places]
    differ = {places[each.row.op] for each in [*report.measured.support, *report.measured.backend]
              if each.row.op in places}
    return {
        "where": report.measured.match.measurement.where,
        "lines": [line.strip() for line in iterate_agreement_lines(report.measured)],
        "ops": [[place, op.preferred, op.ane, op.cost] for place, op in pairs],
        "differ": sorted(differ),
    }
