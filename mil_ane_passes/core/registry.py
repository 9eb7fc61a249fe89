"""Finds rules: every module of `rules/` and `rewrites/`, and third parties by entry point. There is no list to edit.

A third party names a module or a class under the entry point group `mil_ane_passes.rules`; see `plugins`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Iterator

from .contract import STAGES, Rewrite, Rule
from .errors import InputError, RuleError, nearest
from .plugins import ENTRY_POINTS, LeftOut, accepted, defined_in
from .rule_class import flaw, named, place, shares_code

__all__ = ["ENTRY_POINTS", "all_rules", "by_name", "explainable", "fixes_for", "left_out", "refresh", "rewrites"]

_FOLDERS = ("mil_ane_passes.rules", "mil_ane_passes.rewrites")
_TELLING = 3
"Letters from which a part of a name says which rules are meant."


def all_rules() -> dict[str, type[Rule]]:
    """Every rule by name. Raises RuleError when two of ours share a name or a code, naming both files."""
    return _known()[0]


def left_out() -> list[LeftOut]:
    """What of other distributions is not used, and why; it was said when it was found."""
    return _known()[1]


def refresh() -> None:
    """Look for rules anew at the next question, for tests and for plugins that arrive late."""
    _discovered.cache_clear()


def _known() -> tuple[dict[str, type[Rule]], list[LeftOut]]:
    rules, left, complete = _discovered()
    if not complete:
        _discovered.cache_clear()
    return rules, left


@functools.cache
def _discovered() -> tuple[dict[str, type[Rule]], list[LeftOut], bool]:
    """The rules, what is left out, and whether all were asked: a plugin that is being imported is not there yet."""
    ours: dict[str, type[Rule]] = {}
    codes: dict[str, type[Rule]] = {}
    for rule in _of_folders():
        for table, key, what in ((ours, rule.name, "name"), (codes, rule.code, "code")):
            if what == "code" and shares_code(rule):
                continue
            if key in table:
                raise RuleError(f"{what} '{key}' is claimed by {place(table[key])} and by {place(rule)}; "
                                f"expected one rule for each {what}")
            table[key] = rule
    theirs, left, complete = accepted(ours)
    return dict(sorted({**ours, **theirs}.items())), left, complete


def rewrites() -> dict[str, type[Rewrite]]:
    """The rules that know their fix, by name."""
    return {name: rule for name, rule in all_rules().items() if issubclass(rule, Rewrite)}


def fixes_for(rule: type[Rule]) -> list[type[Rewrite]]:
    """The rewrites that fix what `rule` finds, in the order of pipelines; a rewrite fixes what it finds itself."""
    if issubclass(rule, Rewrite):
        return [rule]
    found = [each for each in rewrites().values() if rule in each.fixes]
    return sorted(found, key=lambda each: (STAGES.index(each.stage), each.name))


def by_name(name: str) -> type[Rewrite]:
    """The rewrite called `name` (with or without `ane::`). Raises InputError with the nearest name."""
    known = rewrites()
    short = name.removeprefix("ane::")
    if short not in known:
        coded = next((f"; did you mean '{rule.name}'?" for rule in known.values()
                      if name.lower() in (rule.code.lower(), rule.slug)), "")
        raise InputError(f"no pass '{name}'; `mil-ane-passes passes` lists them{coded or nearest(short, known)}"
                         f"{_left_out()}")
    return known[short]


def explainable(key: str, *others: type[Rule]) -> type[Rule]:
    """The rule with this code, slug or name, in any case, `others` included.

    Raises InputError with the codes that begin so, the names that have it in them, or the nearest of all.
    """
    names: dict[str, type[Rule]] = {}
    rules = [*all_rules().values(), *others]
    for rule in sorted(rules, key=shares_code, reverse=True):  # a code that is shared means the problem
        names.update({rule.code.lower(): rule, rule.slug: rule, rule.name: rule})
    wanted = key.lower().removeprefix("ane::")
    if wanted not in names:
        hint = _alike(wanted, rules) or nearest(wanted, names)
        raise InputError(f"no rule '{key}'; `mil-ane-passes passes` lists codes and names{hint}{_left_out()}")
    return names[wanted]


def _alike(wanted: str, rules: Iterable[type[Rule]]) -> str:
    """The codes that begin with `wanted`, or else the names that have it in them; nothing for a letter or two."""
    if len(wanted) < _TELLING:
        return ""
    if begun := sorted(rule.code for rule in rules if rule.code.lower().startswith(wanted)):
        return f"; of codes that begin so there are {', '.join(begun)}"
    having = sorted(rule.name for rule in rules if wanted in rule.name)
    return f"; names that have it are {', '.join(having)}" if having else ""


def _of_folders() -> Iterator[type[Rule]]:
    for folder in _FOLDERS:
        package = importlib.import_module(folder)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                yield _of_file(f"{folder}.{module.name}")


def _of_file(module: str) -> type[Rule]:
    loaded = importlib.import_module(module)
    rules = defined_in(loaded)
    if len(rules) != 1:
        raise RuleError(f"{loaded.__file__} defines {len(rules)} rules; expected exactly one a file")
    rule = named(rules[0])
    wrong = flaw(rule, ours=True, quick=True)
    if wrong:
        raise RuleError(f"{place(rule)} {wrong}")
    return rule


def _left_out() -> str:
    """For an error about a name: it may be a plugin's."""
    names = sorted({each.distribution for each in left_out()})
    return f"; left out are rules of {', '.join(names)}" if names else ""
