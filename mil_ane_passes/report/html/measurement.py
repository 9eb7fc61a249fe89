"""Core ML's measurement on a Mac, encoded for the page, which shows it next to the prediction."""

from __future__ import annotations

from typing import Any

from ..agreement import iterate_agreement_lines
from ..lint import LintReport

__all__ = ["encode_measurement"]


def encode_measurement(report: LintReport) -> dict[str, Any] | None:
    """Encode the measured system, the summary, and each op; None without a measurement.

    An op is encoded as the index of its row, the device that Core ML prefers, its support on the ANE, and its fraction
    of the cost.
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
