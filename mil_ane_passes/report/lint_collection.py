"""Reports of several packages in one output: text with a line of summary, a line for each finding, JSON, or SARIF.

Reports are added one by one and not kept, as each holds the program of its package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .._version import make_json_header
from ..passes.severity import Severity
from ..utils.text_format import escape_text, format_count
from .baseline import LINT_SCHEMA
from .formats import format_report
from .ignored import count_ignored
from .lint import LintReport
from .lint_lines import format_concise_lines, format_github_line, format_github_lines
from .sarif import SarifLog

__all__ = ["Collection", "CollectionTotals", "JsonCollection", "LineCollection", "SarifCollection", "SingleReport",
           "TextCollection"]


@dataclass
class CollectionTotals:
    """Counts over the reports so far. `failed` has the messages of packages without report, by path; `gates` are
    messages about gates that a package did not pass."""

    packages: int = 0
    with_findings: int = 0
    findings: int = 0
    ignored: int = 0
    not_judged: int = 0
    ops: int = 0
    on_ane: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    gates: list[str] = field(default_factory=list)
    severities: dict[Severity, int] = field(default_factory=lambda: dict.fromkeys(Severity, 0))

    def add(self, report: LintReport) -> None:
        """Count the findings of a report by severity, and its ops."""
        if report.not_judged:
            self.not_judged += 1
            return
        shown = report.shown_findings
        findings = sum(item.severity.fails for item in shown)
        self.packages += 1
        self.with_findings += bool(findings)
        self.findings += findings
        for item in shown:
            self.severities[item.severity] += 1
        self.ignored += count_ignored(report)
        self.ops += len(report.plan.rows)
        self.on_ane += report.on_ane

    def to_dict(self) -> dict[str, Any]:
        return {"packages": self.packages, "with_findings": self.with_findings, "findings": self.findings,
                "severities": {each.value: count for each, count in self.severities.items()},
                "ignored": self.ignored, **({"not_judged": self.not_judged} if self.not_judged else {}),
                "ops": self.ops, "predicted_on_ane": self.on_ane, "failed": len(self.failed)}

    def list_failures(self) -> list[dict[str, str]]:
        """List the packages without report as JSON."""
        return [{"model": path, "error": message} for path, message in self.failed.items()]

    def __str__(self) -> str:
        where = f" in {self.with_findings} of them" if self.findings and self.packages > 1 else ""
        failed = f"; {format_count(len(self.failed), 'package')} could not be read" if self.failed else ""
        skipped = f"; {self.not_judged} for the CPU, not judged" if self.not_judged else ""
        ignored = f", {self.ignored} ignored" if self.ignored else ""
        severities = ", ".join(f"{count} {each.label}" for each, count in self.severities.items()
                               if each.fails and count)
        return (f"{format_count(self.packages, 'package')}: {format_count(self.findings, 'finding')}{where}"
                f"{f' ({severities})' if severities else ''}, "
                f"{format_count(self.severities[Severity.SUGGESTION], 'suggestion')}{ignored}; {self.on_ane} of "
                f"{format_count(self.ops, 'op')} predicted on the ANE{skipped}{failed}")


class Collection(Protocol):
    """An output that reports are added to."""

    def add(self, report: LintReport) -> str | None:
        """Add a report; returns what can be printed already."""

    def finish(self, totals: CollectionTotals) -> str | None:
        """Return what stands at the end of the output."""


@dataclass
class SingleReport:
    """The output of one package, in any form of `format_report`."""

    form: str
    everything: bool = False
    evidence: bool = True

    def add(self, report: LintReport) -> str | None:
        return format_report(report, self.form, everything=self.everything, evidence=self.evidence)

    def finish(self, totals: CollectionTotals) -> str | None:
        return None


@dataclass
class TextCollection:
    """The text of each report, and a line of summary."""

    everything: bool = False
    evidence: bool = True

    def add(self, report: LintReport) -> str | None:
        return f"{format_report(report, 'text', everything=self.everything, evidence=self.evidence)}\n"

    def finish(self, totals: CollectionTotals) -> str | None:
        return escape_text(totals)


@dataclass
class LineCollection:
    """A line for each finding, "concise" or an annotation of "github"; there, failures are annotations, too."""

    form: str

    def add(self, report: LintReport) -> str | None:
        lines = format_concise_lines(report) if self.form == "concise" else format_github_lines(report)
        return "\n".join(lines) or None

    def finish(self, totals: CollectionTotals) -> str | None:
        if self.form == "concise":
            return None
        errors = (*totals.gates, *totals.failed.values())
        return "\n".join(format_github_line("error", "mil-ane-passes lint", each) for each in errors) or None


def build_heading(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Build the keys that JSON about several packages begins with."""
    return {**make_json_header("lint", LINT_SCHEMA), **settings}


@dataclass
class JsonCollection:
    """One object: `reports` has the JSON of each package, `failed` the packages without report."""

    settings: Mapping[str, Any]
    reports: list[dict[str, Any]] = field(default_factory=list)

    def add(self, report: LintReport) -> str | None:
        self.reports.append(report.to_dict())
        return None

    def finish(self, totals: CollectionTotals) -> str | None:
        return json.dumps({**build_heading(self.settings), "reports": self.reports, "failed": totals.list_failures(),
                           "summary": totals.to_dict()}, indent=2, allow_nan=False)


@dataclass
class SarifCollection:
    """One SARIF run with the results of all packages."""

    settings: Mapping[str, Any]
    log: SarifLog = field(default_factory=SarifLog)

    def add(self, report: LintReport) -> str | None:
        self.log.add(report)
        return None

    def finish(self, totals: CollectionTotals) -> str | None:
        properties = {**self.settings, "predicted": True, "summary": totals.to_dict(), "models": self.log.models}
        return json.dumps(self.log.build(properties, list(totals.failed.values())), indent=2, allow_nan=False)
