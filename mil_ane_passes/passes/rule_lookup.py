"""Lookup of one rule by its code, slug or name, for classes of rules and for their pages alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..utils.errors import InputError, suggest_nearest

__all__ = ["RuleKeys", "find_rule_name"]

_MIN_HINT_LETTERS = 3
"Minimum length of a partial name for which similar rules are suggested."


class RuleKeys(NamedTuple):
    """The names of a rule; `shares_code` is True for a rewrite with the code of a problem that another rule reports."""

    name: str
    code: str
    slug: str
    shares_code: bool


def find_rule_name(key: str, rules: Iterable[RuleKeys], note: str = "") -> str:
    """Find the name of the rule with this code, slug or name, in any case.

    Raises InputError with the codes that start with it, the names that contain it, or the nearest of all, and `note`.
    """
    known = sorted(rules, key=lambda rule: rule.shares_code, reverse=True)  # a code that is shared means the problem
    names = {each: rule.name for rule in known for each in (rule.code.lower(), rule.slug, rule.name)}
    required = key.lower().removeprefix("ane::")
    if required not in names:
        words = [each for rule in known for each in (rule.code, rule.slug, rule.name)]
        hint = _suggest_similar(required, known) or suggest_nearest(required, words)
        raise InputError(f"no rule '{key}'; `mil-ane-passes passes` lists codes and names{hint}{note}")
    return names[required]


def _suggest_similar(key: str, rules: Iterable[RuleKeys]) -> str:
    """Suggest the codes that start with `key`, or else the names that contain it; nothing for one or two letters."""
    if len(key) < _MIN_HINT_LETTERS:
        return ""
    if begun := sorted({rule.code for rule in rules if rule.code.lower().startswith(key)}):
        return f"; codes with this prefix: {', '.join(begun)}"
    having = sorted(rule.name for rule in rules if key in rule.name)
    return f"; names that contain it: {', '.join(having)}" if having else ""
