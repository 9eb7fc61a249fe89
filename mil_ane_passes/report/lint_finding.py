"""One finding of `lint`, as data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ..core.contract import Hit, Rewrite, Rule
from ..core.printer import format_dimension
from ..core.query import is_symbolic
from ..core.registry import fixes_for, get_all_rewrites
from ..core.rule_class import shares_code
from ..core.scopes import Origin, find_origin
from ..residency.prediction import RuleResult

__all__ = ["LintFinding", "build_finding", "find_fix", "get_shape_and_dtype"]


@dataclass(frozen=True)
class LintFinding:
    """One hit or near miss of one rule. `index` is None where the op is none of the counted ones (a const).

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
    "The pass that fixes it, as `--passes` takes it."
    not_fixed_because: str = ""
    "Why the rewrites that fix such findings leave this op alone."
    split_at: tuple[tuple[str, ...], ...] = ()
    "Cuts that put the op in a package of its own, as `edit --split-at` takes them, one after the other."

    @property
    def problem(self) -> type[Rule]:
        """The rule whose code and slug it has: of a rewrite without a code of its own, the first that it fixes."""
        return self.rule.fixes[0] if issubclass(self.rule, Rewrite) and shares_code(self.rule) else self.rule

    @property
    def level(self) -> str:
        """ "warning" fails a gate. A note does not: near misses, and rewrites that run only when asked for by name."""
        asked = issubclass(self.rule, Rewrite) and self.rule.preset == "named" and not self.rule.refuses
        return "note" if self.near_miss or asked else self.rule.level

    @property
    def fix(self) -> dict[str, Any] | None:
        """The pass that fixes it, as `--passes` takes it, or what the user can do; None for neither."""
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
        """What makes a finding the same one in a baseline: its rule and its place, not its words."""
        return self.rule.code, self.function, self.op, self.value

    def to_dict(self) -> dict[str, Any]:
        """Of a near miss rule, place and reason only: there may be many, and there is nothing to act on."""
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
            "evidence": [source.to_dict() for source in self.rule.evidence],
        }


def find_fix(rule: type[Rule]) -> type[Rewrite] | None:
    """The first rewrite that fixes what `rule` finds, which a rewrite does itself."""
    return next(iter(fixes_for(rule)), None)


def build_finding(item: RuleResult, places: Mapping[Operation, int]) -> LintFinding:
    """`item` as data; `places` has the index of each counted op."""
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
        answer.split_at if isinstance(answer, Hit) else ())


def get_shape_and_dtype(var: Var | None) -> tuple[list[int | str] | None, str | None]:
    """Shape ("?" for what is not fixed) and dtype of a value; None for both where it is no tensor."""
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
