"""A finding and the rewrite that mends it are one: what lint says of both is said once, at the finding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from coremltools.converters.mil.mil import Operation

from ..core.contract import Hit, Miss, Rewrite, Rule
from ..core.registry import rewrites
from ..residency.predict import Found

__all__ = ["cures", "mended"]

_Answers = Mapping[Operation, Mapping[str, Hit | Miss]]


def cures(rules: Iterable[Rule]) -> set[str]:
    """The names of the rewrites that are known and mend what `rules` find."""
    known = rewrites()
    return {name for rule in rules for name in rule.mended_by if name in known}


def mended(found: Sequence[Found], reported: Collection[str]) -> list[Found]:
    """`found` without the hits of rewrites where a finding that they mend is: that finding names the rewrite instead.

    Findings count that are `reported`, by the names of their rules. Where each rewrite that was asked leaves the place
    alone, the finding has the reason of the first.
    """
    helpers = cures(item.rule for item in found)
    answers: dict[Operation, dict[str, Hit | Miss]] = defaultdict(dict)
    for item in found:
        if item.rule.name in helpers:
            answers[item.answer.op][item.rule.name] = item.answer
    fires = {item.rule.name for item in found if item.rule.name in helpers and isinstance(item.answer, Hit)}
    said: set[tuple[str, Operation]] = set()
    for item in found:
        if item.rule.name in reported and isinstance(item.answer, Hit) and not (
                item.answer.mended_by or item.answer.unmended):
            said |= _told(item.rule, item.answer, answers, fires)
    return [item for item in found if not (isinstance(item.answer, Hit) and isinstance(item.rule, Rewrite)
                                           and (item.rule.name, item.answer.op) in said)]


def _told(rule: Rule, hit: Hit, answers: _Answers, fires: Collection[str]) -> set[tuple[str, Operation]]:
    """Writes into `hit` what its rewrites say; returns which hits of theirs need no mention.

    A rewrite that fires somewhere may mend this place, too: whole regions are reported at one of their ops.
    """
    asked = [(name, op, answers[op][name]) for name in rule.mended_by for op in dict.fromkeys((hit.op, *hit.covers))
             if op in answers and name in answers[op]]
    able = [(name, op) for name, op, answer in asked if isinstance(answer, Hit)]
    if able:
        hit.mended_by = able[0][0]
        return {(name, op) for name, op in able}
    reasons = [f"{name}: {answer.reason}" for name, _, answer in asked if isinstance(answer, Miss)]
    able_elsewhere = [name for name in rule.mended_by if name in fires]
    if reasons:
        hit.unmended = reasons[0]
    elif able_elsewhere:
        hit.mended_by = able_elsewhere[0]
    elif rule.mended_by:
        hit.unmended = f"{', '.join(rule.mended_by)}: not at this place"
    return set()
