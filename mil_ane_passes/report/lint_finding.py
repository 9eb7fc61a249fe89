"""One finding of `lint` as data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ..ane.prediction import RuleResult
from ..ir.printer import format_dimension
from ..ir.query import is_symbolic
from ..ir.scopes import Origin, find_origin
from ..passes.contract import Evidence, Hit, Rewrite, Rule
from ..passes.registry import fixes_for, get_all_rewrites
from ..passes.rule_class import shares_code

__all__ = ["LintFinding", "build_finding", "find_fix", "get_shape_and_dtype"]


@dataclass(frozen=True)
class LintFinding:
    """One hit or near miss of one rule. `index` is None if the op is not counted (a const).

    `covers` has the indices of all ops it stands for. `refuses`: the op is unsupported on the ANE (`sure` False: that
    is not known); `message`: Core ML's own words.
    """

    rule: type[Rule]
    function: str
    index: int | None
    op: str
    value: str
    reason: str
    near_miss: bool
    refuses: bool
    sure: bool
    message: str | None
    origin: Origin | None
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
    def evidence(self) -> tuple[Evidence, ...]:
        return self.sources or self.rule.evidence

    @property
    def problem(self) -> type[Rule]:
        """The rule whose code and slug the finding has: for a rewrite without its own code, the first rule that it
        fixes."""
        return self.rule.fixes[0] if issubclass(self.rule, Rewrite) and shares_code(self.rule) else self.rule

    @property
    def level(self) -> str:
        """The level: "warning" fails a gate, "note" does not.

        Near misses, and rewrites that run only by name, are notes.
        """
        asked = issubclass(self.rule, Rewrite) and self.rule.preset == "named" and not self.rule.refuses
        return "note" if self.near_miss or asked else self.rule.level

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

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON.

        A near miss has rule, place and reason only: there may be many, and they require no action.
        """
        if self.near_miss:
            return {"code": self.rule.code, "slug": self.rule.slug, "rule": self.rule.name, "level": self.level,
                    "function": self.function, "index": self.index, "op": self.op, "value": self.value,
                    "reason": self.reason, "near_miss": True}
        return {
            "code": self.rule.code, "slug": self.rule.slug, "rule": self.rule.name, "summary": self.rule.summary(),
            "level": self.level, "function": self.function, "index": self.index,
            "covers": list(self.covers), "op": self.op, "value": self.value,
            "reason": self.reason, "near_miss": self.near_miss, "refuses": self.refuses, "sure": self.sure,
            "message": self.message, "confidence": self.rule.confidence, "fix": self.fix,
            "not_fixed_because": self.not_fixed_because or None,
            "split_at": [list(values) for values in self.split_at],
            "origin": self.origin.to_dict() if self.origin else None,
            "evidence": [source.to_dict() for source in self.evidence],
        }


def find_fix(rule: type[Rule]) -> type[Rewrite] | None:
    """Return the first rewrite that fixes the findings of `rule`; a rewrite fixes its own."""
    return next(iter(fixes_for(rule)), None)


def build_finding(item: RuleResult, places: Mapping[Operation, int]) -> LintFinding:
    """Convert `item` to a finding; `places` has the index of each counted op."""
    rule, answer = item.rule, item.answer
    op = answer.op
    hit = isinstance(answer, Hit)
    covered = answer.covers if isinstance(answer, Hit) else (op,)
    return LintFinding(
        type(rule), item.function, places.get(op), op.op_type, op.outputs[0].name if op.outputs else op.name,
        answer.note if isinstance(answer, Hit) else answer.reason, not hit, hit and rule.refuses,
        answer.sure if isinstance(answer, Hit) else False, answer.message if isinstance(answer, Hit) else None,
        find_origin(op), tuple(places[one] for one in covered if one in places),
        item.fixed_by, item.not_fixed_because,
        answer.split_at if isinstance(answer, Hit) else (),
        answer.evidence if isinstance(answer, Hit) else ())


def get_shape_and_dtype(var: Var | None) -> tuple[list[int | str] | None, str | None]:
    """Return shape ("?" for dynamic extents) and dtype of a value.

    Both are None where it has neither (a list, for instance).
    """
    shape, dtype = (None, None) if var is None else _get_type_shape_and_dtype(var.sym_type)
    return None if shape is None else list(shape), dtype


@functools.lru_cache(maxsize=1 << 16)
def _get_type_shape_and_dtype(sym_type: Any) -> tuple[tuple[int | str, ...] | None, str | None]:
    inner = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    if types.is_list(inner) or types.is_tuple(inner) or inner is types.unknown:
        return None, None
    if not types.is_tensor(inner):
        return (), str(types.builtin_to_string(inner))
    shape = tuple(format_dimension(extent) if is_symbolic(extent) else int(extent) for extent in inner.get_shape())
    return shape, str(types.builtin_to_string(inner.get_primitive()))
