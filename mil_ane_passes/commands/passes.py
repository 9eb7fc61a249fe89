"""List all rules and passes: code, name, preset, exactness, summary."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._version import make_json_header
from ..passes.evidence import format_evidence
from ..passes.severity import Severity
from ..report.table import format_table
from .options import add_format_option
from .output import print_report
from .pages import Facts, load_rule_pages

__all__ = ["NO_FIX", "Catalogue", "Page"]

HELP = "list the passes"
EXAMPLE = "passes"

NO_FIX = "no fix"
"Text for a rule whose findings no rewrite fixes."
_ROW_KEYS = ("pass", "code", "slug", "summary", "fix", "preset", "exactness", "stage", "fixes", "fixed_by", "options")
_KEYS_OF_TEXT = frozenset({"listed", "shares_code", "option_docs"})
"Fields that are not part of the JSON of a page."


def add(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print_report(Catalogue([facts for facts in load_rule_pages()[0] if facts["listed"]]), arguments.format)
    return 0


def _format_pass_name(facts: Facts) -> str:
    """Format a pass as pipelines name it; a rule without a fix is not a pass."""
    return f"ane::{facts['pass']}" if facts["fix"] else str(facts["pass"])


def _describe_relation(facts: Facts) -> str:
    """Describe which rewrites fix a problem, or which problems a rewrite fixes."""
    if facts["fix"]:
        return f"fixes {', '.join(facts['fixes'])}" if facts["fixes"] else "fixes its own findings"
    return f"fixed by {', '.join(facts['fixed_by'])}" if facts["fixed_by"] else NO_FIX


@dataclass(frozen=True)
class Catalogue:
    """Rules, one row each, in the order of their pages."""

    pages: Sequence[Facts]

    def to_dict(self) -> dict[str, Any]:
        rows = [{key: facts[key] for key in _ROW_KEYS} for facts in self.pages]
        return {**make_json_header("passes"), "passes": rows}

    def __str__(self) -> str:
        lines = [[facts["code"], _format_pass_name(facts), facts["preset"] or "-", facts["exactness"] or "-",
                  _describe_relation(facts), facts["summary"]] for facts in self.pages]
        return "\n".join(format_table(lines[0], (str.ljust,) * len(lines[0]), lines[1:]))


@dataclass(frozen=True)
class Page:
    """The page of one rule: docstring, options, evidence."""

    facts: Facts

    def to_dict(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.facts.items() if key not in _KEYS_OF_TEXT}
        return {**make_json_header("explain"), **kept}

    def __str__(self) -> str:
        facts = self.facts
        lines = [f"{facts['code']} {facts['slug']}"]
        if facts["fix"]:
            lines.append(f"pass: {_format_pass_name(facts)} ({facts['exactness']}, preset {facts['preset']})")
            lines += [f"fixes: {', '.join(facts['fixes'])}"] if facts["fixes"] else []
        else:
            names = ", ".join(f"ane::{name}" for name in facts["fixed_by"])
            lines.append(f"rule: {_format_pass_name(facts)}, {f'fixed by {names}' if names else NO_FIX}")
        lines += ["unsupported on the ANE"] if facts["refuses"] else []
        lines.append(f"severity: {Severity(facts['severity']).label}; on: {', '.join(facts['targets'])}; "
                     f"confidence {facts['confidence']}")
        lines += ["", facts["text"] or ""]
        lines += ["", f"what to do: {facts['advice']}"] if facts["advice"] else []
        lines += ["", f"bound: {facts['bound']}"] if facts["bound"] else []
        options = facts["options"]
        lines += ["", "options"] if options else []
        lines += [f"    {name}={default}  {facts['option_docs'][name]}" for name, default in options.items()]
        lines += ["", "evidence", *(f"    {format_evidence(each)}" for each in facts["evidence"])]
        return "\n".join(lines)
