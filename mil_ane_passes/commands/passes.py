"""List every rule and pass: code, name, preset, exactness, what it does."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..report.table import format_table
from .options import add_format_option
from .output import print_report

if TYPE_CHECKING:
    from ..passes.contract import Evidence, Rule

__all__ = ["NO_FIX", "Catalogue", "Page"]

HELP = "list the passes"
EXAMPLE = "passes"

NO_FIX = "no fix"
"Text for a rule without a rewrite that fixes its findings."


def add(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print_report(Catalogue(), arguments.format)
    return 0


def _build_row(rule: type[Rule]) -> dict[str, Any]:
    from ..passes.contract import Rewrite
    from ..passes.registry import fixes_for

    fix = issubclass(rule, Rewrite)
    return {
        "pass": rule.name, "code": rule.code, "slug": rule.slug, "summary": rule.summary(), "fix": fix,
        "preset": rule.preset if issubclass(rule, Rewrite) else None,
        "exactness": rule.exactness.value if issubclass(rule, Rewrite) else None,
        "stage": rule.stage if fix else None,
        "fixes": [problem.name for problem in rule.fixes] if issubclass(rule, Rewrite) else [],
        "fixed_by": [] if fix else [each.name for each in fixes_for(rule)],
        "options": {name: option.default for name, option in rule.options().items()},
    }


def _format_pass_name(row: dict[str, Any]) -> str:
    """Format a pass as pipelines name it; a rule without a fix is not a pass."""
    return f"ane::{row['pass']}" if row["fix"] else str(row["pass"])


def _relation(row: dict[str, Any]) -> str:
    """Describe which rewrites fix a problem, or which problems a rewrite fixes."""
    if row["fix"]:
        return f"fixes {', '.join(row['fixes'])}" if row["fixes"] else "fixes what it finds"
    return f"fixed by {', '.join(row['fixed_by'])}" if row["fixed_by"] else NO_FIX


@dataclass(frozen=True)
class Catalogue:
    """All rules, one row each, sorted by code; a problem comes before the fixes that share its code."""

    def rows(self) -> list[dict[str, Any]]:
        from ..passes.registry import get_all_rules
        from ..passes.rule_class import shares_code

        return [
            _build_row(rule)
            for rule in sorted(get_all_rules().values(), key=lambda rule: (rule.code, shares_code(rule)))
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "passes", "passes": self.rows()}

    def __str__(self) -> str:
        lines = [[row["code"], _format_pass_name(row), row["preset"] or "-", row["exactness"] or "-", _relation(row),
                  row["summary"]] for row in self.rows()]
        return "\n".join(format_table(lines[0], (str.ljust,) * len(lines[0]), lines[1:]))


@dataclass(frozen=True)
class Page:
    """The page of one rule: docstring, options, evidence."""

    rule: type[Rule]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "explain", **_build_row(self.rule), "text": inspect.getdoc(self.rule),
                "bound": getattr(self.rule, "bound", ""), "refuses": self.rule.refuses,
                "confidence": self.rule.confidence, "severity": self.rule.get_severity().value,
                "advice": self.rule.advice or None,
                "targets": _list_generations(self.rule),
                "evidence": [evidence.to_dict() for evidence in self._evidence()]}

    def _evidence(self) -> list[Evidence]:
        """Return the rule's own evidence, then that of the problems that it fixes."""
        from ..passes.contract import Rewrite

        problems = self.rule.fixes if issubclass(self.rule, Rewrite) else ()
        return list(dict.fromkeys(each for rule in (self.rule, *problems) for each in rule.evidence))

    def __str__(self) -> str:
        row = _build_row(self.rule)
        lines = [f"{self.rule.code} {self.rule.slug}"]
        if row["fix"]:
            lines.append(f"pass: {_format_pass_name(row)} ({row['exactness']}, preset {row['preset']})")
            lines += [f"fixes: {', '.join(row['fixes'])}"] if row["fixes"] else []
        else:
            names = ", ".join(f"ane::{name}" for name in row["fixed_by"])
            lines.append(f"rule: {_format_pass_name(row)}, {f'fixed by {names}' if names else NO_FIX}")
        lines += ["unsupported on the ANE"] if self.rule.refuses else []
        lines.append(f"severity: {self.rule.get_severity().label}; on: {', '.join(_list_generations(self.rule))}; "
                     f"confidence {self.rule.confidence}")
        bound = getattr(self.rule, "bound", "")
        lines += ["", inspect.getdoc(self.rule) or ""]
        lines += ["", f"what to do: {self.rule.advice}"] if self.rule.advice else []
        lines += ["", f"bound: {bound}"] if bound else []
        options = self.rule.options()
        lines += ["", "options"] if options else []
        lines += [f"    {name}={option.default}  {option.doc}" for name, option in options.items()]
        lines += ["", "evidence", *(f"    {evidence}" for evidence in self._evidence())]
        return "\n".join(lines)


def _list_generations(rule: type[Rule]) -> list[str]:
    from ..passes.targets import GENERATIONS

    return [generation.name for generation in GENERATIONS if rule.targets.includes(generation)]
