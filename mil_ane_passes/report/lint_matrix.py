"""Lint reports of packages on several targets, as tables: targets side by side, op kinds and findings below."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..passes.severity import Severity
from ..utils.text_format import format_count, format_duration, format_lines
from .ignored import count_ignored
from .lint import LintReport
from .lint_collection import build_heading
from .lint_statistics import RuleCount, count_rules
from .table import format_table

__all__ = ["MatrixCollection", "PackageMatrix", "TargetColumn"]

_ABSENT = "-"
"The cell of a finding that a target does not have."


@dataclass(frozen=True)
class TargetColumn:
    """The summary of the report on one target. `kinds` counts the ops of each kind by support: yes, no, unknown."""

    target: str
    share: float
    time_share: float
    summary: Mapping[str, Any]
    kinds: Mapping[str, Counter[str]]
    rules: Sequence[RuleCount]
    ignored: int = 0

    @classmethod
    def of(cls, report: LintReport) -> TargetColumn:
        kinds: dict[str, Counter[str]] = {}
        for row in report.plan.rows:
            kinds.setdefault(row.op.op_type, Counter())[row.ane] += 1
        return cls(report.target, report.share, report.time_share, report.summary(), kinds, count_rules([report]),
                   count_ignored(report))

    def to_dict(self) -> dict[str, Any]:
        kinds = [{"op": kind, "count": found.total(), "supported": found["yes"], "unsupported": found["no"],
                  "unknown": found["unknown"]} for kind, found in self.kinds.items()]
        return {"target": self.target, "summary": dict(self.summary), "kinds": kinds,
                "ignored": self.ignored,
                "findings": [{name: value for name, value in rule.to_dict().items() if name != "packages"}
                             for rule in self.rules]}


@dataclass(frozen=True)
class PackageMatrix:
    """One package on several targets."""

    model: str
    columns: Sequence[TargetColumn]
    not_judged: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "targets": [column.to_dict() for column in self.columns],
                **({"not_judged": self.not_judged} if self.not_judged else {})}

    def format(self, *, everything: bool = False) -> str:
        """Format the tables; `everything`: also op kinds that are supported everywhere."""
        if self.not_judged:
            return format_lines([f"{self.model}: {self.not_judged}: not judged"])
        targets = [column.target for column in self.columns]
        ops = self.columns[0].summary["ops"]
        lines = [f"{self.model} on {len(targets)} targets, predicted: {format_count(ops, 'op')}"]
        lines += _format_matrix("", targets, self._iterate_shares())
        kinds, hidden = self._select_kinds(everything)
        lines += ["", *_format_matrix("op kind (supported of all)", targets, kinds)] if kinds else []
        lines += [f"{format_count(hidden, 'other kind')} supported on every target (--all shows them)"] * bool(hidden)
        findings = list(self._iterate_findings())
        lines += ["", *_format_matrix("finding", targets, findings)] if findings else ["no findings"]
        return format_lines(lines)

    def _iterate_shares(self) -> Iterable[tuple[str, list[str]]]:
        columns = self.columns
        yield "ops on the ANE", [str(each.summary["predicted_on_ane"]) for each in columns]
        yield "% of ops", [f"{each.share:.1f}" for each in columns]
        yield "% of estimated time", [f"{each.time_share:.1f}" for each in columns]
        yield "ops unsupported", [str(each.summary["ane_unsupported"]) for each in columns]
        yield "ops unmeasured", [str(each.summary["ane_unknown"]) for each in columns]
        yield "transitions", [str(each.summary["transitions"]) for each in columns]
        if any(each.ignored for each in columns):
            yield "findings ignored", [str(each.ignored) for each in columns]
        yield "latency", [_format_latency(each.summary["latency_us"]) for each in columns]

    def _select_kinds(self, everything: bool) -> tuple[list[tuple[str, list[str]]], int]:
        """Return a row for each op kind, those first that are supported least, and the number of kinds left out."""
        kinds = sorted(self.columns[0].kinds, key=lambda kind: (self._count_supported(kind), kind))
        shown = [kind for kind in kinds if everything or not self._is_supported(kind)]
        return [(kind, [_format_support(each.kinds[kind]) for each in self.columns]) for kind in shown], \
            len(kinds) - len(shown)

    def _count_supported(self, kind: str) -> int:
        return sum(each.kinds[kind]["yes"] for each in self.columns)

    def _is_supported(self, kind: str) -> bool:
        return all(each.kinds[kind]["yes"] == each.kinds[kind].total() for each in self.columns)

    def _iterate_findings(self) -> Iterable[tuple[str, list[str]]]:
        """Yield a row for each rule, the worst first, with the number of its findings on each target."""
        rules: dict[tuple[int, str, str, Severity], list[str]] = {}
        for at, column in enumerate(self.columns):
            for rule in column.rules:
                key = rule.severity.rank, rule.code, rule.slug, rule.severity
                rules.setdefault(key, [_ABSENT] * len(self.columns))[at] = str(rule.count)
        for key in sorted(rules, key=lambda key: key[:3]):
            yield f"{key[1]} {key[2]} ({key[3].value})", rules[key]


def _format_matrix(head: str, targets: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    align = (str.ljust, *(str.rjust for _ in targets))
    return format_table((head, *targets), align, [(name, *cells) for name, cells in rows])


def _format_support(found: Counter[str]) -> str:
    """Format the supported ops of all, and those that are not known with a question mark."""
    unknown = f" {found['unknown']}?" if found["unknown"] else ""
    return f"{found['yes']}/{found.total()}{unknown}"


def _format_latency(microseconds: float | None) -> str:
    return _ABSENT if microseconds is None else format_duration(microseconds / 1e3)


@dataclass
class MatrixCollection:
    """The output of `lint` for several targets, as text or JSON."""

    form: str
    targets: Sequence[str]
    everything: bool = False
    packages: list[dict[str, Any]] = field(default_factory=list)

    def add(self, matrix: PackageMatrix) -> str | None:
        """Add a package; returns its text."""
        if self.form == "json":
            self.packages.append(matrix.to_dict())
            return None
        return matrix.format(everything=self.everything)

    def finish(self, failed: Sequence[Mapping[str, str]]) -> str | None:
        """Return the JSON; `failed` has the packages without a report."""
        if self.form != "json":
            return None
        return json.dumps({**build_heading({"targets": list(self.targets)}), "packages": self.packages,
                           "failed": list(failed)}, indent=2, allow_nan=False)
