"""Matching of findings with the rewrites that fix them, so that a problem and its fix are one finding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from coremltools.converters.mil.mil import Operation

from ..passes.contract import Hit, Miss, Rewrite, Rule
from ..passes.registry import fixes_for
from .prediction import RuleResult

__all__ = ["attach_fixes", "names_of_fixes"]

_Answers = Mapping[Operation, Mapping[str, Hit | Miss]]


def names_of_fixes(rules: Iterable[Rule]) -> set[str]:
    """Return the names of the rewrites that fix the findings of those `rules` that only report."""
    return {fix.name for rule in rules if not isinstance(rule, Rewrite) for fix in fixes_for(type(rule))}


def attach_fixes(found: Sequence[RuleResult], reported: Collection[str]) -> list[RuleResult]:
    """Attach to each hit in `found` the rewrite that fixes it, or the reason why none does.

    Answers of rewrites are dropped if the problem that they fix is reported, that is, if the name of its rule is in
    `reported`. If every matched rewrite skips the op, the finding has the reason of the first.
    """
    fixing = names_of_fixes(item.rule for item in found)
    fixing |= {_get_pass_name(item.answer.fixed_by) for item in found if isinstance(item.answer, Hit)}
    answers: dict[Operation, dict[str, Hit | Miss]] = defaultdict(dict)
    for item in found:
        if item.rule.name in fixing:
            answers[item.answer.op][item.rule.name] = item.answer
    firing = {item.rule.name for item in found if item.rule.name in fixing and isinstance(item.answer, Hit)}
    merged: set[tuple[str, Operation]] = set()
    kept = []
    for item in found:
        if item.rule.name in reported and isinstance(item.answer, Hit) and not isinstance(item.rule, Rewrite):
            item, able = _attach_fix(item, item.answer, answers, firing)
            merged |= able
        kept.append(item)
    return [item for item in kept if not (isinstance(item.rule, Rewrite)
                                          and (item.rule.name, item.answer.op) in merged)]


def _get_pass_name(spelling: str) -> str:
    """Return the name of a pass in the spelling of `--passes`, which may have options."""
    return spelling.partition("{")[0]


def _attach_fix(
    item: RuleResult, hit: Hit, answers: _Answers, firing: Collection[str]
) -> tuple[RuleResult, set[tuple[str, Operation]]]:
    """Attach a fix to `item`. Returns it with the answers of rewrites, by name and op, that it replaces.

    A rewrite that fires somewhere may fix this op, too: an entire region is reported at one of its ops.
    """
    if hit.fixed_by:
        name = _get_pass_name(hit.fixed_by)
        return replace(item, fixed_by=hit.fixed_by), {(name, op) for op in hit.covers if name in answers.get(op, ())}
    known = fixes_for(type(item.rule))
    types = {op.op_type for op in hit.covers}
    # A rewrite that looks at some of the rule's own op types does not fix the others. One that looks at readers of such
    # ops (the cast after an argmax) fixes them all.
    fixes = [fix.name for fix in known if not (own := set(fix.roots) & set(item.rule.roots)) or own & types]
    if known and not fixes:
        return replace(item, not_fixed_because=f"{known[0].name}: applies to {', '.join(known[0].roots)} only"), set()
    asked = [(name, op, answers[op][name]) for name in fixes for op in dict.fromkeys((hit.op, *hit.covers))
             if op in answers and name in answers[op]]
    able = [(name, op) for name, op, answer in asked if isinstance(answer, Hit)]
    if able:
        return replace(item, fixed_by=able[0][0]), set(able)
    merged = {(name, op) for name, op, _ in asked}
    reasons = [f"{name}: {answer.reason}" for name, _, answer in asked if isinstance(answer, Miss)]
    elsewhere = [name for name in fixes if name in firing]
    if elsewhere and not reasons:
        return replace(item, fixed_by=elsewhere[0]), merged
    if fixes:
        return replace(item, not_fixed_because=(reasons or [f"{', '.join(fixes)}: no match"])[0]), merged
    return item, merged
