"""Grouping of findings by cause, the worst cause first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..passes.contract import Rewrite, Rule
from ..passes.finding import Finding
from ..passes.plan import Plan, Row
from ..passes.severity import Severity

__all__ = ["FindingGroup", "find_costliest", "group_findings"]

_RowKey = tuple[str, int]


@dataclass
class FindingGroup:
    """The findings of one rule, in program order.

    `ops` counts the ops that they cover, `cpu_ms` is the predicted time of those ops, and of the stranded ones, on the
    CPU; `stranded` counts the ops that are supported on the ANE but predicted on the CPU in one segment with them.
    `cpu_ms` and `stranded` are 0 if the rule reports no unsupported op.
    """

    rule: type[Rule]
    findings: list[Finding] = field(default_factory=list)
    ops: int = 0
    cpu_ms: float = 0.0
    stranded: int = 0

    @property
    def severity(self) -> Severity:
        """The severity of the worst finding; near misses are suggestions."""
        return min((item.severity for item in self.findings), key=lambda each: each.rank)

    @property
    def is_optional_rewrite(self) -> bool:
        """True if the group only suggests a rewrite: nothing has to be fixed."""
        return self.severity is Severity.SUGGESTION and issubclass(self.rule, Rewrite)


def group_findings(findings: Iterable[Finding], plan: Plan) -> list[FindingGroup]:
    """Group and sort findings; linear in ops and findings.

    They are in the order of severity, and within one by the predicted time on the CPU, including stranded ops;
    unmeasured ones come last.
    """
    made: dict[str, FindingGroup] = {}
    for item in findings:
        made.setdefault(item.rule.name, FindingGroup(item.rule)).findings.append(item)
    rows = {(row.function, row.index): row for row in plan.rows}
    stretches = _map_to_segment_starts(plan, rows)
    along: dict[_RowKey, list[Row]] = defaultdict(list)
    for place, start in stretches.items():
        if rows[place].takes and not rows[place].op.op_type.startswith("constexpr_"):
            along[start].append(rows[place])
    for group in made.values():
        _measure_group(group, rows, stretches, along)
    return sorted(made.values(), key=lambda group: (group.severity.rank, group.rule.unmeasured, -group.cpu_ms,
                                                    -len(group.findings), group.rule.code))


def find_costliest(findings: Iterable[Finding], plan: Plan) -> Finding | None:
    """Find the finding that fails and costs most: of the group with the most time on the CPU, stranded ops included.

    None if no finding fails; the first one of the worst group where none costs time.
    """
    groups = [group for group in group_findings(findings, plan) if group.severity.fails]
    if not groups:
        return None
    rows = {(row.function, row.index): row for row in plan.rows}
    group = max(groups, key=lambda each: each.cpu_ms)
    return max(group.findings, key=lambda item: sum(
        rows[item.function, index].cost.cpu for index in item.covers if (item.function, index) in rows))


def _map_to_segment_starts(plan: Plan, rows: Mapping[_RowKey, Row]) -> dict[_RowKey, _RowKey]:
    """Map each op in a segment on the CPU to the start of that segment."""
    return {(segment.function, index): (segment.function, segment.first)
            for segment in plan.segments if segment.backend == "cpu"
            for index in range(segment.first, segment.last + 1) if (segment.function, index) in rows}


def _include_nested(places: Iterable[_RowKey], rows: Mapping[_RowKey, Row]) -> Iterable[_RowKey]:
    """Return those places that are counted ops, and the ops inside their blocks, each once."""
    found: dict[_RowKey, None] = {}
    for function, index in places:
        held = rows.get((function, index))
        if held is None or (function, index) in found:
            continue
        found[function, index] = None
        inner = rows.get((function, index + 1)) if held.op.blocks else None
        while inner is not None and inner.depth > held.depth:
            found[function, inner.index] = None
            inner = rows.get((function, inner.index + 1))
    return found


def _measure_group(group: FindingGroup, rows: Mapping[_RowKey, Row], stretches: Mapping[_RowKey, _RowKey],
                   along: Mapping[_RowKey, list[Row]]) -> None:
    covered = dict.fromkeys((item.function, index) for item in group.findings for index in item.covers)
    group.ops = len(covered)
    if group.rule.refuses:
        starts = dict.fromkeys(stretches[place] for place in covered if place in stretches)
        dragged = [row for start in starts for row in along.get(start, ())]
        group.stranded = len(dragged)
        group.cpu_ms = sum(rows[place].cost.cpu for place in _include_nested(covered, rows))
        group.cpu_ms += sum(row.cost.cpu for row in dragged)
