"""A lint report as text for people: grouped by cause, worst first, near misses last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lint import LintReport

__all__ = ["text"]


def text(report: LintReport) -> str:
    """The report as lines."""
    lines = [f"{item.rule.code} {item.rule.slug}  %{item.value} ({item.op}): {item.reason}" for item in report.findings]
    summary = report.summary()
    lines.append(f"{summary['ops']} ops, {summary['predicted_on_ane']} predicted on the ANE, "
                 f"{summary['switches']} switches")
    return "\n".join(lines)
