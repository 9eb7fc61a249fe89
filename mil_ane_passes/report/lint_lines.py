"""A lint report in lines, one for each finding: for editors and logs, and as annotations of GitHub workflows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..package.executorch_program import find_read_file
from ..utils.pass_description import describe_exactness
from ..utils.text_format import escape_text
from .network import LayerFinding

if TYPE_CHECKING:
    from ..passes.finding import Finding
    from .lint import LintReport

__all__ = ["format_concise_lines", "format_github_lines", "format_github_line", "get_fix_pass"]


def format_concise_lines(report: LintReport) -> list[str]:
    """Format the findings that count as lines: `path:value: CODE slug severity: reason; fix: rewrite (how exact)`."""
    return [line for _, line in _iterate_lines(report)]


def format_github_lines(report: LintReport) -> list[str]:
    """Format the findings that count as annotations of a GitHub workflow; those of a delegate are at its program."""
    file = os.fspath(find_read_file(report.model))
    return [format_github_line(item.severity.github_level, f"{item.code} {item.slug}", line, file)
            for item, line in _iterate_lines(report)]


def format_github_line(level: str, title: str, message: str, file: str | None = None) -> str:
    """Format a workflow command that makes an annotation; `level` is error, warning or notice.

    GitHub reads a message up to the end of the line, and a property up to a comma or colons, and decodes `%25`, `%0D`,
    `%0A`, `%3A` and `%2C`. Control characters are escaped as in all text, so that only the percent sign, colons and
    commas are left to encode.
    """
    place = "" if file is None else f",file={_escape_property(file)}"
    return f"::{level} title={_escape_property(title)}{place}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    return escape_text(text).replace("%", "%25")


def _escape_property(text: str) -> str:
    return re.sub("[:,]", lambda found: f"%{ord(found[0]):02X}", _escape_message(text))


def _iterate_lines(report: LintReport) -> Iterator[tuple[Finding | LayerFinding, str]]:
    several = len(report.plan.program.functions) > 1
    for item in report.shown_findings:
        if isinstance(item, LayerFinding):
            place = item.layer
        else:
            place = f"{item.function}/{item.value}" if several else item.value
        fix = get_fix_pass(item)
        words = f"; fix: {fix} ({describe_exactness(item.fix['exactness'])})" if fix and item.fix else ""
        said = f"{item.code} {item.slug} {item.severity.value}: {item.reason}{words}"
        yield item, escape_text(f"{report.model}:{place}: {said}")


def get_fix_pass(item: Finding | LayerFinding) -> str | None:
    """Return the rewrite that fixes a finding, in the syntax of `--passes`; None if none does."""
    fix = item.fix
    return None if fix is None or fix["pass"] is None else str(fix["pass"]).removeprefix("ane::")
