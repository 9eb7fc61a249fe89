"""Findings of lint counted per rule, and ops per type and backend, over one package or several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..passes.severity import Severity
from ..utils.text_format import format_duration, format_lines
from .lint import LintReport
from .lint_collection import CollectionTotals, build_heading
from .lint_lines import get_fix_pass
from .table import format_table, join_sides

__all__ = ["KindCount", "RuleCount", "StatisticsCollection", "count_rules"]


@dataclass
class RuleCount:
    """Counts of one rule at one severity: its findings, the packages that have some, and by which rewrites how many of
    them are fixed."""

    code: str
    slug: str
    severity: Severity
    count: int = 0
    packages: int = 0
    fixes: dict[str, int] = field(default_factory=dict)

    @property
    def fixable(self) -> int:
        return sum(self.fixes.values())

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "slug": self.slug, "severity": self.severity.value, "count": self.count,
                "packages": self.packages, "fixable": self.fixable, "fixes": self.fixes}

    def describe_fixes(self) -> str:
        """Name the rewrites; how many findings each fixes is said where it is not all."""
        return ", ".join(name if count == self.count else f"{name} ({count} of {self.count})"
                         for name, count in self.fixes.items()) or "-"


@dataclass
class KindCount:
    """The ops of one type: those predicted on the ANE and on the CPU, and the sum of the estimates of each backend in
    milliseconds."""

    kind: str
    on_ane: int = 0
    on_cpu: int = 0
    ane_ms: float = 0.0
    cpu_ms: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"op": self.kind, "on_ane": self.on_ane, "on_cpu": self.on_cpu, "est_ane_ms": self.ane_ms,
                "est_cpu_ms": self.cpu_ms}


_Kinds = dict[str, KindCount]
"Counts by op type."
_Rules = dict[tuple[str, str, Severity], RuleCount]
"Counts by code, slug and severity."


def count_rules(reports: Iterable[LintReport]) -> list[RuleCount]:
    """Count the findings of each rule that count in the reports, the most frequent rule first."""
    rules: _Rules = {}
    for report in reports:
        _count_findings(report, rules)
    return _sort_rules(rules)


def _count_findings(report: LintReport, rules: _Rules) -> None:
    seen = set()
    for item in report.shown_findings:
        key = item.code, item.slug, item.severity
        rule = rules.setdefault(key, RuleCount(*key))
        rule.count += 1
        rule.packages += key not in seen
        seen.add(key)
        fix = get_fix_pass(item)
        if fix is not None:
            name = fix.partition("{")[0]  # with options, such as an axis, it is the same rewrite
            rule.fixes[name] = rule.fixes.get(name, 0) + 1


def _sort_rules(rules: _Rules) -> list[RuleCount]:
    return sorted(rules.values(), key=lambda rule: (-rule.count, rule.code, rule.slug, rule.severity.rank))


def _count_kinds(report: LintReport, kinds: _Kinds) -> None:
    for row in report.plan.rows:
        kind = kinds.setdefault(row.op.op_type, KindCount(row.op.op_type))
        spent = row.cost.of(row.engine)
        if row.backend == "ane":
            kind.on_ane, kind.ane_ms = kind.on_ane + 1, kind.ane_ms + spent
        else:
            kind.on_cpu, kind.cpu_ms = kind.on_cpu + 1, kind.cpu_ms + spent


def _sort_kinds(kinds: _Kinds) -> list[KindCount]:
    """Sort the counts of op types: those that take most of the time first."""
    return sorted(kinds.values(), key=lambda kind: (-kind.ane_ms - kind.cpu_ms, kind.kind))


def _format_kinds(before: _Kinds, after: _Kinds | None) -> list[str]:
    """Format a table with a line for each op type; with `after`, what changed is shown as `before -> after`."""
    sides = [before] if after is None else [before, after]
    names = dict.fromkeys(kind.kind for side in sides for kind in _sort_kinds(side))
    rows = []
    for name in names:
        found = [side.get(name, KindCount(name)) for side in sides]
        rows.append((name, join_sides(each.on_ane for each in found),
                     join_sides(format_duration(each.ane_ms) if each.on_ane else "0" for each in found),
                     join_sides(each.on_cpu for each in found),
                     join_sides(format_duration(each.cpu_ms) if each.on_cpu else "0" for each in found)))
    head = ("op", "on the ANE", "estimate", "on the CPU", "estimate")
    return [*format_table(head, (str.ljust,) + (str.rjust,) * 4, rows),
            "estimates of Core ML's segmenter (on an M4), predicted: they decide placement and are not a latency"
            ] if rows else []


@dataclass
class StatisticsCollection:
    """The output of `lint --statistics`: tables, or JSON, with the most frequent rule and the costliest op type first.
    """

    form: str
    settings: Mapping[str, Any]
    rules: _Rules = field(default_factory=dict)
    kinds: _Kinds = field(default_factory=dict)
    kinds_after: _Kinds | None = None
    "The op types of the model that is compared with, if there is one."

    def add(self, report: LintReport) -> str | None:
        """Count the findings and the ops of a report; nothing is printed before the end."""
        if report.not_judged:
            return None
        _count_findings(report, self.rules)
        _count_kinds(report, self.kinds)
        if report.after is not None:
            self.kinds_after = {} if self.kinds_after is None else self.kinds_after
            _count_kinds(report.after, self.kinds_after)
        return None

    def finish(self, totals: CollectionTotals) -> str | None:
        rules = _sort_rules(self.rules)
        if self.form == "json":
            return json.dumps({**build_heading(self.settings), "statistics": [rule.to_dict() for rule in rules],
                               "op_kinds": [kind.to_dict() for kind in _sort_kinds(self.kinds)],
                               **({} if self.kinds_after is None else {
                                   "op_kinds_after": [kind.to_dict() for kind in _sort_kinds(self.kinds_after)]}),
                               "failed": totals.list_failures(), "summary": totals.to_dict()}, indent=2)
        rows = [(str(rule.count), rule.code, rule.slug, rule.severity.value, str(rule.packages), rule.describe_fixes())
                for rule in rules]
        align = (str.rjust, str.ljust, str.ljust, str.ljust, str.rjust, str.ljust)
        table = format_table(("count", "code", "rule", "severity", "packages", "fixed by"), align, rows) if rows else []
        kinds = _format_kinds(self.kinds, self.kinds_after)
        return format_lines([*table, *([""] if table else []), *kinds, *([""] if kinds else []), str(totals)])
