"""The list of rules and the page of one, generated from the rules themselves."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from ..core.contract import Rewrite, Rule
from ..core.registry import all_rules
from ..core.targets import GENERATIONS
from .table import aligned

__all__ = ["NO_FIX", "Catalogue", "Page"]

NO_FIX = "no fix"
"What stands where a rewrite states its exactness, for a rule that only reports."


def _row(rule: type[Rule]) -> dict[str, Any]:
    fix = issubclass(rule, Rewrite)
    return {
        "pass": rule.name, "code": rule.code, "slug": rule.slug, "summary": rule.summary(), "fix": fix,
        "preset": rule.preset if issubclass(rule, Rewrite) else None,
        "exactness": rule.exactness.value if issubclass(rule, Rewrite) else None,
        "stage": rule.stage if fix else None,
        "options": {name: option.default for name, option in rule.options().items()},
    }


def _spelt(row: dict[str, Any]) -> str:
    """A pass as pipelines name it; a rule without fix is no pass."""
    return f"ane::{row['pass']}" if row["fix"] else str(row["pass"])


@dataclass(frozen=True)
class Catalogue:
    """Every rule, one row each."""

    def rows(self) -> list[dict[str, Any]]:
        return sorted((_row(rule) for rule in all_rules().values()), key=lambda row: str(row["code"]))

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "passes", "passes": self.rows()}

    def __str__(self) -> str:
        lines = [[row["code"], _spelt(row), row["preset"] or "-", row["exactness"] or NO_FIX, row["summary"]]
                 for row in self.rows()]
        return "\n".join(aligned(lines[0], (str.ljust,) * len(lines[0]), lines[1:]))


@dataclass(frozen=True)
class Page:
    """One rule in full: docstring, options, evidence."""

    rule: type[Rule]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "explain", **_row(self.rule), "text": inspect.getdoc(self.rule),
                "bound": getattr(self.rule, "bound", ""), "refuses": self.rule.refuses,
                "confidence": self.rule.confidence, "level": self.rule.level, "advice": self.rule.advice or None,
                "mended_by": list(self.rule.mended_by), "no_rewrite": self.rule.no_rewrite or None,
                "targets": _generations(self.rule),
                "evidence": [evidence.to_dict() for evidence in self.rule.evidence]}

    def __str__(self) -> str:
        row = _row(self.rule)
        lines = [f"{self.rule.code} {self.rule.slug}"]
        lines.append(f"fix: {_spelt(row)} ({row['exactness']}, preset {row['preset']})" if row["fix"]
                     else f"{NO_FIX}: {_spelt(row)} reports, and says what to do")
        cures = ", ".join(f"ane::{name}" for name in self.rule.mended_by)
        lines += [f"mended by: {cures}"] if cures else []
        lines += [f"no rewrite: {self.rule.no_rewrite}"] if self.rule.no_rewrite else []
        lines += ["refuses: the ANE does not take what it finds"] if self.rule.refuses else []
        lines.append(f"on: {', '.join(_generations(self.rule))}; confidence {self.rule.confidence}")
        bound = getattr(self.rule, "bound", "")
        lines += ["", inspect.getdoc(self.rule) or ""]
        lines += ["", f"what to do: {self.rule.advice}"] if self.rule.advice else []
        lines += ["", f"bound: {bound}"] if bound else []
        options = self.rule.options()
        lines += ["", "options"] if options else []
        lines += [f"    {name}={option.default}  {option.doc}" for name, option in options.items()]
        lines += ["", "evidence", *(f"    {evidence}" for evidence in self.rule.evidence)]
        return "\n".join(lines)


def _generations(rule: type[Rule]) -> list[str]:
    return [generation.name for generation in GENERATIONS if rule.targets.admits(generation)]
