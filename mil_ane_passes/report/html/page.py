"""Assembly of the page: skeleton, style, scripts, and the report as JSON, in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

from ..lint import LintReport
from .payload import build_payload, describe_cause, sanitize_text

__all__ = ["SCRIPTS", "build_page"]

SCRIPTS = ("dom", "model", "theme", "grid", "summary", "step", "strip", "changes", "findings", "layout", "graph",
           "drawing", "ops", "buffers", "weights", "rules", "details", "main")
"""The files of the script, in the order in which they run."""


def build_page(report: LintReport, after: LintReport | None = None) -> str:
    """Build the page for `report`; with `after` (or `report.after`), also for the rewritten model, side by side.

    The page is self-contained: it loads nothing else, and its content security policy forbids loading. Names and texts
    of the model are data and never become markup.
    """
    after = after if after is not None else report.after
    style, script = _read_resource("style.css"), _build_script()
    parts = {
        "policy": _build_policy(style, script),
        "title": html.escape(sanitize_text(f"{_get_file_name(report.model)}: predicted on the ANE of {report.target}")),
        "lead": html.escape(_format_lead(report)),
        "style": style,
        "data": _embed_json(build_payload(report, after)),
        "script": script,
    }
    made = _read_resource("page.html")
    head, *rest = made.split("{{")
    for piece in rest:
        name, text = piece.split("}}", 1)
        head += parts[name] + text
    return head


def _read_resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _build_script() -> str:
    """Wrap all files in one function in strict mode, so that their names are not global."""
    parts = "\n".join(_read_resource(f"app/{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();\n'


def _build_policy(style: str, script: str) -> str:
    """Build the content security policy: nothing is loaded, and only this style and this script are allowed."""
    return (
        f"default-src 'none'; script-src {_compute_digest(script)}; style-src {_compute_digest(style)}; base-uri "
        f"'none'; "
        "form-action 'none'"
    )


def _compute_digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embed_json(data: dict[str, Any]) -> str:
    """Encode JSON in ASCII without angle brackets and ampersands, so that no text can end the script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _format_lead(report: LintReport) -> str:
    """Format the summary that is shown without JavaScript."""
    summary = report.summary()
    if report.not_judged:
        return f"{report.not_judged}: not judged. "
    return (f"{summary['predicted_on_ane']} of {summary['ops']} ops are predicted to run on the ANE of "
            f"{report.target}, in {len(report.plan.segments)} segments; {len(report.findings)} findings. "
            + describe_cause(report.plan) + _format_step(report)
            + "".join(f" {line}." for line in map(str, report.upgraded)))


def _format_step(report: LintReport) -> str:
    step = report.next_step
    return "" if step is None else f" Next step: {step.command or step.words}."


def _get_file_name(model: str) -> str:
    """Return the file's name without its folders."""
    return model.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
