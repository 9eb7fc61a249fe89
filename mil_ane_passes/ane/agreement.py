"""Comparison of our prediction with Core ML's answers: supported ops, backends, and estimated costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median
from typing import Any, Literal

import numpy as np

from ..passes.plan import Plan, Row
from ..passes.registry import get_all_rules
from .compute_plan import MeasuredOp, PlanMatch
from .segments import find_cheapest_partition

__all__ = [
    "Agreement",
    "CostShares",
    "Disagreement",
    "apply_measurement",
    "compare_with_measurement",
    "compute_cost_factors",
]

_TIE_MS = 1e-6
"Milliseconds up to which two partitions cost the same."
_MIN_OPS_FOR_FACTOR = 3
"Minimum number of ops of one type on one backend for which a factor is reported."


@dataclass(frozen=True)
class Disagreement:
    """An op on which our prediction and Core ML disagree: whether it is supported on the ANE, or where it runs.

    `ours` and `reason` are our prediction before the measurement was applied, `codes` the rules that made it a "no".
    """

    what: Literal["support", "backend"]
    row: Row
    measured_op: MeasuredOp
    ours: str
    theirs: str
    reason: str
    codes: tuple[str, ...] = ()


@dataclass
class CostShares:
    """Cost shares: each op's share of the model's cost, ours and Core ML's, on the backend that Core ML prefers."""

    rows: list[tuple[Row, MeasuredOp, float, float]] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        return sorted(abs(ours / theirs - 1) for _, _, ours, theirs in self.rows if theirs > 0)

    def to_dict(self) -> dict[str, Any]:
        errors = self.errors
        return {"ops": len(self.rows), "correlation": self.correlation,
                "median_error": median(errors) if errors else None,
                "p90_error": errors[math.ceil(0.9 * len(errors)) - 1] if errors else None,
                "max_error": errors[-1] if errors else None}

    @property
    def correlation(self) -> float | None:
        """Pearson correlation, None where one side does not vary."""
        pairs = np.array([(ours, theirs) for _, _, ours, theirs in self.rows]).reshape(-1, 2)
        if len(pairs) < 2 or not np.all(np.ptp(pairs, axis=0) > 0):
            return None
        return float(np.corrcoef(pairs.T)[0, 1])


@dataclass
class Agreement:
    """Agreement of a plan with a measurement.

    `support` and `backend` are the ops that differ; `newly_known` the ops whose support we had predicted as "unknown".

    `extra_ms`: by our estimates, how much more the measured partition costs than ours; None if that cannot be
    computed.
    """

    match: PlanMatch
    support: list[Disagreement] = field(default_factory=list)
    backend: list[Disagreement] = field(default_factory=list)
    newly_known: list[tuple[Row, MeasuredOp]] = field(default_factory=list)
    shares: CostShares = field(default_factory=CostShares)
    segments: int = 0
    measured_segments: int = 0
    extra_ms: float | None = None

    @property
    def is_tie(self) -> bool:
        """True if the backends differ only between partitions that cost the same by our estimates."""
        return bool(self.backend) and self.extra_ms is not None and self.extra_ms <= _TIE_MS

    @property
    def agrees(self) -> bool:
        return not self.support and (not self.backend or self.is_tie)

    def kinds(self) -> dict[str, dict[str, int]]:
        """Count, by op type, the ops whose ANE support Core ML reported: all, agreeing, differing and unknown ones."""
        wrong, new = {id(each.row) for each in self.support}, {id(row) for row, _ in self.newly_known}
        table: dict[str, dict[str, int]] = defaultdict(lambda: {"ops": 0, "agree": 0, "differ": 0, "unknown": 0})
        for row, told in self.match.pairs:
            if told.ane is not None:
                counts = table[row.op.op_type]
                counts["ops"] += 1
                counts["differ" if id(row) in wrong else "unknown" if id(row) in new else "agree"] += 1
        return dict(sorted(table.items()))


def compare_with_measurement(plan: Plan, match: PlanMatch) -> Agreement:
    """Compare the prediction in `plan` with a measurement."""
    found = Agreement(match)
    refusing = {rule.code for rule in get_all_rules().values() if rule.refuses}
    for row, told in match.pairs:
        if told.ane is None:
            continue
        if row.ane == "unknown":
            found.newly_known.append((row, told))
        elif (row.ane == "yes") != told.ane:
            codes = tuple(code for code in row.codes if code in refusing) if told.ane else ()
            found.support.append(
                Disagreement("support", row, told, row.ane, "yes" if told.ane else "no", row.reason, codes))
    placed = [(row, told) for row, told in match.pairs if told.preferred is not None]
    found.backend = [Disagreement("backend", row, told, row.backend, str(told.preferred), row.reason)
                     for row, told in placed if row.backend != told.preferred]
    found.segments = _count_segments([(row.function, row.backend) for row, _ in placed])
    found.measured_segments = _count_segments([(row.function, told.preferred) for row, told in placed])
    found.extra_ms = _compute_extra_cost(plan, match)
    found.shares = _compute_cost_shares(match)
    return found


def apply_measurement(plan: Plan, found: Agreement) -> None:
    """Replace predicted support by measured support where they differ, or where it was unknown.

    For a target of several generations only a "no" is applied: a "yes" would need a machine of each. The predicted
    backends are unchanged. A machine of another generation, or one without an ANE, changes nothing.
    """
    measurement = found.match.measurement
    if not measurement.uses_ane or measurement.generation not in plan.generations:
        return
    told = [(each.row, each.measured_op) for each in found.support]
    for row, each in [*told, *found.newly_known]:
        if not each.ane or len(plan.generations) == 1:
            row.ane = "yes" if each.ane else "no"
            support = "supported" if each.ane else "unsupported"
            row.reason = f"measured by you on {measurement.where}: it is {support} on the ANE"


def _count_segments(backends: Sequence[Any]) -> int:
    return sum(1 for _ in groupby(backends))


def _compute_cost_shares(match: PlanMatch) -> CostShares:
    """Compute the shares over the ops for which both sides have a cost on the preferred backend.

    Each side's shares sum to 1.
    """
    known: list[tuple[Row, MeasuredOp, float, float]] = []
    for row, told in match.pairs:
        ours = row.cost.ane if told.preferred == "ane" else row.cost.cpu if told.preferred == "cpu" else None
        if ours is not None and told.cost is not None:
            known.append((row, told, ours, told.cost))
    total, theirs = sum(ours for _, _, ours, _ in known), sum(cost for _, _, _, cost in known)
    if not (total > 0 and theirs > 0):
        return CostShares()
    return CostShares([(row, told, ours / total, cost / theirs) for row, told, ours, cost in known])


def _compute_extra_cost(plan: Plan, match: PlanMatch) -> float | None:
    """Compute how much more the measured partition costs than the cheapest one, by our estimates, with each op fixed
    to its measured backend."""
    told = {id(row): each.preferred for row, each in match.pairs}
    extra = 0.0
    for name, function in plan.program.functions.items():
        rows = [row for row in plan.of(name) if not row.op.op_type.startswith("constexpr_")]
        ends = set(function.outputs)
        made = [sum(var in ends for var in row.op.outputs) for row in rows]
        held = []
        for row in rows:
            where = told.get(id(row))
            if where == "gpu" or (where == "ane" and row.cost.ane is None):
                return None
            held.append(replace(row.cost, ane=None) if where == "cpu" else
                        replace(row.cost, bnns=math.inf, classic=math.inf) if where == "ane" else row.cost)
        extra += find_cheapest_partition(held, made)[1] - find_cheapest_partition([row.cost for row in rows], made)[1]
    return max(0.0, extra)


def compute_cost_factors(shares: CostShares) -> list[dict[str, Any]]:
    """Compute, per op type and backend with at least three ops, the factor between Core ML's shares and ours."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, told, ours, theirs in shares.rows:
        if ours > 0 and theirs > 0:
            groups[row.op.op_type, str(told.preferred)].append(theirs / ours)
    return [
        {
            "op": kind,
            "backend": backend,
            "ops": len(ratios),
            "factor": median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
        for (kind, backend), ratios in sorted(groups.items())
        if len(ratios) >= _MIN_OPS_FOR_FACTOR
    ]
