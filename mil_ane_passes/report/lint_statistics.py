"""Findings of lint counted per rule, over one package or several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..passes.severity import Severity
from ..utils.text_format import format_lines
from .lint import LintReport
from .lint_collection import CollectionTotals, build_heading
from .lint_lines import get_fix_pass
from .table import format_table

__all__ = ["RuleCount", "StatisticsCollection", "count_rules"]


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


@dataclass
class StatisticsCollection:
    """The output of `lint --statistics`: a table, or JSON, with the most frequent rule first."""

    form: str
    settings: Mapping[str, Any]
    rules: _Rules = field(default_factory=dict)

    def add(self, report: LintReport) -> str | None:
        """Count the findings of a report; nothing is printed before the end."""
        _count_findings(report, self.rules)
        return None

    def finish(self, totals: CollectionTotals) -> str | None:
        rules = _sort_rules(self.rules)
        if self.form == "json":
            return json.dumps({**build_heading(self.settings), "statistics": [rule.to_dict() for rule in rules],
                               "failed": totals.list_failures(), "summary": totals.to_dict()}, indent=2)
        rows = [(str(rule.count), rule.code, rule.slug, rule.severity.value, str(rule.packages), rule.describe_fixes())
                for rule in rules]
        align = (str.rjust, str.ljust, str.ljust, str.ljust, str.rjust, str.ljust)
        table = format_table(("count", "code", "rule", "severity", "packages", "fixed by"), align, rows) if rows else []
        return format_lines([*table, *([""] if table else []), str(totals)])
