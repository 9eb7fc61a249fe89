"""One finding of a rule as data, for the reports of `lint` and `rewrite`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..ir.scopes import Origin, find_origin
from .contract import Evidence, Hit, Miss, Rewrite, Rule
from .registry import fixes_for, get_all_rewrites
from .severity import Severity

__all__ = ["Finding", "build_finding", "collect_fixes", "find_fix"]


@dataclass(frozen=True)
class Finding:
    """A hit or a near miss of a rule as data for reports: names and text, no graph objects.

    `problem` is the rule whose code and slug the finding has: for a rewrite without its own code, a rule that it fixes.
    `index` is the position of the op in the linted program, None where no position is counted (a const, or a program
    that is being rewritten), and `covers` has the indices of all ops that the finding stands for. `refuses`: the op is
    unsupported on the ANE (`sure` False: that is not known); `message`: Core ML's own words.
    """

    rule: type[Rule]
    problem: type[Rule]
    function: str
    op: str
    value: str
    reason: str
    near_miss: bool = False
    index: int | None = None
    refuses: bool = False
    sure: bool = False
    message: str | None = None
    origin: Origin | None = None
    "Source location of the op in the original model, if the frontend recorded it."
    covers: tuple[int, ...] = ()
    fixed_by: str = ""
    "The pass that fixes it, in the syntax of `--passes`."
    not_fixed_because: str = ""
    "The reason why the rewrites that fix such findings do not rewrite this op."
    split_at: tuple[tuple[str, ...], ...] = ()
    "Cuts that move the op to a package of its own, as successive arguments of `edit --split-at`."
    sources: tuple[Evidence, ...] = ()
    "The sources on these ops, where the rule's own are not about them."

    @property
    def code(self) -> str:
        return self.problem.code

    @property
    def slug(self) -> str:
        return self.problem.slug

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return self.sources or self.rule.evidence

    @property
    def severity(self) -> Severity:
        """The severity of the rule; a near miss is a suggestion."""
        return Severity.SUGGESTION if self.near_miss else self.rule.get_severity()

    @property
    def fix(self) -> dict[str, Any] | None:
        """The pass that fixes it, in the syntax of `--passes`, or advice to the user; None without either."""
        name, brace, options = self.fixed_by.partition("{")
        fix = get_all_rewrites()[name] if name else None if self.not_fixed_because else find_fix(self.rule)
        if fix is not None:
            return {"pass": f"ane::{fix.name}{brace}{options}", "exactness": fix.exactness.value, "preset": fix.preset,
                    "advice": self.rule.advice or None}
        if self.rule.advice:
            return {"pass": None, "exactness": None, "preset": None, "advice": self.rule.advice}
        return None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The identity of a finding in a baseline: its rule and its place, not its text."""
        return self.rule.code, self.function, self.op, self.value

    def summarize(self) -> dict[str, Any]:
        """Return rule, place and reason as JSON, which lint and rewrite have in common."""
        return {"code": self.code, "slug": self.slug, "rule": self.rule.name, "function": self.function,
                "op": self.op, "value": self.value, "reason": self.reason, "near_miss": self.near_miss}

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON of lint.

        A near miss has rule, place and reason only: there may be many, and they require no action.
        """
        place = {**self.summarize(), "severity": self.severity.value, "index": self.index}
        if self.near_miss:
            return place
        return {
            **place, "summary": self.rule.summary(), "covers": list(self.covers), "refuses": self.refuses,
            "sure": self.sure, "message": self.message, "confidence": self.rule.confidence, "fix": self.fix,
            "not_fixed_because": self.not_fixed_because or None,
            "split_at": [list(values) for values in self.split_at],
            "origin": self.origin.to_dict() if self.origin else None,
            "evidence": [source.to_dict() for source in self.evidence],
        }


def find_fix(rule: type[Rule]) -> type[Rewrite] | None:
    """Return the first rewrite that fixes the findings of `rule`; a rewrite fixes its own."""
    return next(iter(fixes_for(rule)), None)


def collect_fixes(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Collect the passes that fix `findings`, each once, in their order."""
    distinct = {(item.rule, item.fixed_by, bool(item.not_fixed_because)): item for item in findings}
    fixes = [item.fix for item in distinct.values()]
    return list({fix["pass"]: fix for fix in fixes if fix and fix["pass"]}.values())


def build_finding(rule: Rule, answer: Hit | Miss, function: str) -> Finding:
    """Convert a match result of `rule` in `function` to a finding."""
    op = answer.op
    value = op.outputs[0].name if op.outputs else op.name
    problem = _find_problem(rule, answer)
    if isinstance(answer, Miss):
        return Finding(type(rule), problem, function, op.op_type, value, answer.reason, near_miss=True,
                       origin=find_origin(op))
    return Finding(
        type(rule), problem, function, op.op_type, value, answer.note, refuses=rule.refuses, sure=answer.sure,
        message=answer.message, origin=find_origin(op), split_at=answer.split_at, sources=answer.evidence)


def _find_problem(rule: Rule, answer: Hit | Miss) -> type[Rule]:
    """Return the rule that a finding is reported under.

    A rewrite without a code of its own has that of the first rule it fixes, so that rule describes the code, too: one
    code never has two descriptions in a report.
    """
    problem = type(rule)
    if isinstance(rule, Rewrite):
        problem = rule.find_problem(answer.op) if isinstance(answer, Hit) else problem
        if problem is type(rule) and rule.fixes and rule.fixes[0].code == rule.code:
            problem = rule.fixes[0]
    return problem
