"""Selection of rules by codes, prefixes of codes, slugs and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..utils.errors import InputError, suggest_nearest
from .contract import Rule
from .registry import get_all_rules

__all__ = ["configure_rules", "resolve_rule_names", "select_rule_names"]


def resolve_rule_names(keys: Iterable[str] | str, who: str = "rules") -> frozenset[str]:
    """Resolve `keys` to names of rules: each key is a code, the beginning of codes (ANE3), a slug or a name.

    A text is split at commas. Raises InputError, with the nearest key, for one that matches no rule.
    """
    listed = keys.split(",") if isinstance(keys, str) else list(keys)
    wrong = [key for key in listed if not isinstance(key, str) or not key.strip()]
    if wrong or not listed:
        found = repr(wrong[0]) if listed else "an empty list"
        raise InputError(f"{who}: found {found}; expected rules by code, code prefix, slug or name, e.g. "
                         "ANE3,int-inputs", option=who)
    return frozenset(name for key in listed for name in _find_names_by_key(key.strip(), who))


def _find_names_by_key(key: str, who: str) -> list[str]:
    rules = get_all_rules().values()
    required = key.lower().removeprefix("ane::")
    exact = [rule.name for rule in rules if required in (rule.code.lower(), rule.slug, rule.name)]
    if exact:
        return exact
    found = [rule.name for rule in rules if _is_code_prefix(rule.code.lower(), required)]
    if found:
        return found
    known = {word for rule in rules for word in (rule.code, rule.slug, rule.name)}
    raise InputError(f"{who}: no rule '{key}'; expected a code, a code prefix such as ANE3, a slug or a name "
                     f"(`mil-ane-passes passes` lists them){suggest_nearest(required, known)}", option=who)


def _is_code_prefix(code: str, required: str) -> bool:
    """Return whether `required` is all letters of `code` and some of its digits."""
    letters = re.match(r"[^\d]*", code)
    return letters is not None and code.startswith(required) and len(required) >= len(letters[0])


def select_rule_names(select: Iterable[str] | str | None, ignore: Iterable[str] | str | None) -> frozenset[str]:
    """Select the names of the rules to report: those in `select` (None: all) without those in `ignore`."""
    chosen = frozenset(get_all_rules()) if select is None else resolve_rule_names(select, "select")
    return chosen - (frozenset() if ignore is None else resolve_rule_names(ignore, "ignore"))


def configure_rules(options: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Rule]:
    """Create an instance of every rule, by name, with `options` (rule name, code or slug -> {option: value}) set."""
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"options: found {options!r}; expected a mapping from the name of a rule to its options",
                         option="options")
    known = get_all_rules()
    inputs: dict[str, dict[str, Any]] = {}
    for key, values in (options or {}).items():
        if not isinstance(key, str):
            raise InputError(f"options: found the key {key!r}; expected the name or code of a rule",
                             option="options")
        names = _find_names_by_key(key.strip(), "options")
        if len(names) != 1:
            raise InputError(f"options: '{key}' matches {len(names)} rules; expected one, by name or full code",
                             option="options")
        if not isinstance(values, Mapping):
            raise InputError(f"options: found {values!r} for '{key}'; expected its options by name", option="options")
        inputs.setdefault(names[0], {}).update(values)
    try:
        return {name: rule.configured(**inputs.get(name, {})) for name, rule in known.items()}
    except InputError as error:
        raise InputError(*error.args, option="options") from error
