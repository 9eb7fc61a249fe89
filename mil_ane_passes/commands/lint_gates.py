"""Gates of `lint`: what makes its exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..passes.severity import DEFAULT_FAIL_ON, Severity, parse_fail_on
from ..utils.option_spelling import format_option
from ..utils.text_format import format_count
from .options import flag

if TYPE_CHECKING:
    from ..report.lint import LintReport

__all__ = ["GateOptions", "Gates"]


@dataclass(frozen=True)
class GateOptions:
    """The options of the command that decide its exit code."""

    fail_on: str | None = field(default=None, metadata=flag(metavar="SEVERITY"))
    """gate: fail on findings of this severity or worse: wrong, unsupported, slow, suggestion, or never; with
    --baseline, on findings that it does not contain (default: slow; with --fail-under alone: never)"""
    fail_under: str | None = field(default=None, metadata=flag(metavar="PCT"))
    "gate: minimum percentage of ops predicted on the ANE, per package"


@dataclass(frozen=True)
class Gates:
    """The gates of one run: the percent of ops that have to be predicted on the ANE, and the `fail_on` that was given.

    Raises InputError for an unknown severity.
    """

    fail_under: float | None = None
    fail_on: str | None = None
    _given: Severity | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.fail_on is not None:
            object.__setattr__(self, "_given", parse_fail_on(self.fail_on, format_option("fail_on").rstrip("=")))

    @property
    def counted(self) -> Severity:
        """The least severity of the findings that reports count."""
        return self._given or DEFAULT_FAIL_ON

    def find_least(self, report: LintReport) -> Severity | None:
        """Return the least severity that fails in `report`, None if no finding fails."""
        if self.fail_on is not None:
            return self._given
        return DEFAULT_FAIL_ON if self.fail_under is None or report.baseline is not None else None

    def fails(self, report: LintReport) -> bool:
        """Return whether `report` fails a gate."""
        return self.is_under(report) or bool(report.failing_findings(self.find_least(report)))

    def is_under(self, report: LintReport) -> bool:
        """Return whether too few ops are predicted on the ANE."""
        return self.fail_under is not None and not report.not_judged and report.share < self.fail_under

    def explain_failures(self, report: LintReport) -> Iterator[str]:
        """Yield a message for each requested gate that `report` fails."""
        if self.is_under(report):
            yield (f"--fail-under: {report.on_ane} of {len(report.plan.rows)} ops ({report.share:.2f} %) are "
                   f"predicted on the ANE, below the limit of {self.fail_under:g} %")
        failing = len(report.failing_findings(self.find_least(report)))
        if failing and report.baseline is not None:
            yield f"--baseline: {format_count(failing, 'finding')} not in {report.baseline.file}"
        elif failing and self.fail_on is not None:
            yield f"--fail-on {self.fail_on}: {format_count(failing, 'finding')} of this severity or worse"
