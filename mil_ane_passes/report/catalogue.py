"""The tables and pages of rules, generated from the rules themselves."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from ..core.contract import Rewrite, Rule
from ..core.registry import all_rules

__all__ = ["Catalogue", "Page", "markdown_table"]


def _row(rule: type[Rule]) -> dict[str, Any]:
    fix = issubclass(rule, Rewrite)
    return {
        "pass": rule.name, "code": rule.code, "slug": rule.slug, "summary": rule.summary(),
        "preset": rule.preset if issubclass(rule, Rewrite) else None,
        "exactness": rule.exactness.value if issubclass(rule, Rewrite) else None,
        "stage": rule.stage if fix else None,
        "options": {name: option.default for name, option in rule.options().items()},
    }


@dataclass(frozen=True)
class Catalogue:
    """Every rule, one row each."""

    def rows(self) -> list[dict[str, Any]]:
        return sorted((_row(rule) for rule in all_rules().values()), key=lambda row: str(row["code"]))

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "passes", "passes": self.rows()}

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(row["pass"]) for row in rows) + len("ane::")
        return "\n".join(
            f"{row['code']}  {'ane::' + row['pass']:<{width}}  {row['preset'] or '-':<5}  "
            f"{row['exactness'] or '-':<8}  {row['summary']}" for row in rows)


@dataclass(frozen=True)
class Page:
    """One rule in full: docstring, options, evidence."""

    rule: type[Rule]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "explain", **_row(self.rule), "text": inspect.getdoc(self.rule),
                "bound": getattr(self.rule, "bound", ""),
                "evidence": [evidence.to_dict() for evidence in self.rule.evidence]}

    def __str__(self) -> str:
        row = _row(self.rule)
        lines = [f"{self.rule.code} {self.rule.slug}"]
        if row["preset"]:
            lines.append(f"fix: ane::{self.rule.name} ({row['exactness']}, preset {row['preset']})")
        bound = getattr(self.rule, "bound", "")
        lines += ["", inspect.getdoc(self.rule) or ""]
        lines += ["", f"bound: {bound}"] if bound else []
        options = self.rule.options()
        lines += ["", "options"] if options else []
        lines += [f"    {name}={option.default}  {option.doc}" for name, option in options.items()]
        lines += ["", "evidence", *(f"    {evidence}" for evidence in self.rule.evidence)]
        return "\n".join(lines)


def markdown_table() -> str:
    """The README's table of rewrites."""
    lines = ["| code | pass | preset | exactness | what it does |", "|---|---|---|---|---|"]
    lines += [f"| {row['code']} | `{row['pass']}` | {row['preset'] or '–'} | {row['exactness'] or '–'} | "
              f"{row['summary']} |" for row in Catalogue().rows()]
    return "\n".join(lines)
