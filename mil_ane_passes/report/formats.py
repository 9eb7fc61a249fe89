"""Output formats of a lint report."""

from __future__ import annotations

import json

from .lint import LintReport

__all__ = ["format_report"]


def format_report(report: LintReport, form: str, *, everything: bool = False, evidence: bool = True) -> str:
    """Format the report as "text", "html", "sarif" or "json"; `everything` and `evidence` as for `format_lint_text`."""
    if form == "text":
        from .lint_text import format_lint_text

        return format_lint_text(report, everything=everything, evidence=evidence)
    if form == "html":
        from .html import build_page

        return build_page(report, report.after).rstrip("\n")
    if form == "sarif":
        from .sarif import build_sarif

        return json.dumps(build_sarif(report), indent=2, allow_nan=False)
    return json.dumps(report.to_dict(), indent=2, allow_nan=False)
