"""Agreement of a prediction with a measurement, as text and as data, for `lint --measured` and `calibrate-plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..ane.agreement import Agreement, Disagreement
from ..utils.text_format import format_count, format_duration

__all__ = ["agreement_to_dict", "disagreement_to_dict", "find_contradictions", "iterate_agreement_lines"]


_MAX_PROBLEMS_LISTED = 5
"The most problems of the script that are listed."


def iterate_agreement_lines(found: Agreement) -> Iterator[str]:
    """Yield the lines of text: where it was measured, and how much of it agrees with the prediction."""
    measurement, match = found.match.measurement, found.match
    package = f", package {measurement.package}" if measurement.package else ""
    units = f", {measurement.units}" if measurement.units else ""
    yield (f"measured on {measurement.where}{units} ({measurement.file}{package}): "
           f"{format_count(len(match.pairs), 'op')} matched, {len(match.ours)} only in the prediction, "
           f"{len(match.theirs)} only in the measurement")
    for run in measurement.runs:
        spent = "" if run["median_ms"] is None else f"; {format_duration(run['median_ms'])} per prediction (median)"
        wrong = "DIFFERS: " if run["passed"] is False else ""
        yield f"  {run['function']} with {run['units']}: {wrong}{run['says']}{spent}"
    for problem in measurement.problems[:_MAX_PROBLEMS_LISTED]:
        yield f"  problem on that machine: {problem}"
    if len(measurement.problems) > _MAX_PROBLEMS_LISTED:
        yield f"  and {len(measurement.problems) - _MAX_PROBLEMS_LISTED} more problems"
    if not measurement.uses_ane:
        yield ("  no op was supported on the ANE in this measurement: compute units or a machine without an ANE, or "
               "Core ML could not compile for it; this gives no evidence about single ops")
    kinds = found.kinds().values()
    told, right, new = (sum(each[name] for each in kinds) for name in ("ops", "agree", "unknown"))
    yield f"  support: {right} of {told} ops as predicted, {len(found.support)} different, {new} were unknown"
    placed = sum(each.preferred is not None for _, each in match.pairs)
    tie = (
        " (the same cost by our estimates)"
        if found.is_tie
        else ""
        if found.extra_ms is None or not found.backend
        else (f" (measured partition {format_duration(found.extra_ms)} more expensive by our estimates)")
    )
    yield (f"  partition: {placed - len(found.backend)} of {placed} ops on the predicted unit{tie}; segments: "
           f"{found.segments} predicted, {found.measured_segments} measured")
    shares = found.shares.to_dict()
    if shares["median_error"] is not None:
        correlation = "not defined" if shares["correlation"] is None else f"{shares['correlation']:.4f}"
        yield (f"  shares of the cost: {shares['ops']} ops, correlation {correlation}, median error "
               f"{100 * shares['median_error']:.2f} %, 90 % within {100 * shares['p90_error']:.2f} %, worst "
               f"{100 * shares['max_error']:.2f} %")


def find_contradictions(found: Agreement) -> list[dict[str, Any]]:
    """Find entries of our tables that the measurement contradicts: rules by code, or that a type was seen on the
    ANE."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for each in found.support:
        counts.update((code, each.row.op.op_type if not code else "", each.theirs) for code in each.codes or [""])
    return [{"code": code or None, "op": kind or None, "measured": theirs, "ops": ops,
             "on": found.match.measurement.where} for (code, kind, theirs), ops in sorted(counts.items())]


def disagreement_to_dict(each: Disagreement) -> dict[str, Any]:
    row = each.row
    return {"what": each.what, "function": row.function, "index": row.index, "op": row.op.op_type,
            "output": row.op.outputs[0].name if row.op.outputs else None, "predicted": each.ours,
            "measured": each.theirs, "codes": list(each.codes), "reason": each.reason, "cost": each.measured_op.cost}


def agreement_to_dict(found: Agreement) -> dict[str, Any]:
    """Return the summary as in the JSON."""
    return {
        **found.match.measurement.to_dict(), **found.match.counts(), "with_ane": found.match.measurement.uses_ane,
        "agrees": found.agrees, "kinds": found.kinds(),
        "partition": {"differ": len(found.backend), "segments": found.segments,
                      "measured_segments": found.measured_segments, "extra_ms": found.extra_ms, "tie": found.is_tie},
        "shares": found.shares.to_dict(), "contradicted": find_contradictions(found),
    }
