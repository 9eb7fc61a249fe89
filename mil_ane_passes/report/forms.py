"""A lint report in each of its forms."""

from __future__ import annotations

import json

from .lint import LintReport

__all__ = ["formed"]


def formed(report: LintReport, form: str, *, everything: bool = False) -> str:
    """The report as "text" (with all places of each finding: `everything`), "html", "sarif" or "json"."""
    if form == "text":
        from .lint_text import text

        return text(report, everything=everything)
    if form == "html":
        from .html import page

        return page(report, report.after).rstrip("\n")
    if form == "sarif":
        from .sarif import sarif

        return json.dumps(sarif(report), indent=2, allow_nan=False)
    return json.dumps(report.to_dict(), indent=2, allow_nan=False)
