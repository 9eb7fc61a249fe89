"""Finds rules: every module of `rules/` and `rewrites/`, and third parties by entry point. There is no list to edit.

A third party names a module or a class under the entry point group `mil_ane_passes.rules`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from .contract import BlockRewrite, BlockRule, PlanRule, ProgramRewrite, Rewrite, Rule
from .errors import InputError, RuleError, nearest

__all__ = ["ENTRY_POINTS", "all_rules", "by_name", "explainable", "refresh", "rewrites"]

ENTRY_POINTS = "mil_ane_passes.rules"
_FOLDERS = ("mil_ane_passes.rules", "mil_ane_passes.rewrites")
_BASES = (Rule, Rewrite, BlockRule, BlockRewrite, PlanRule, ProgramRewrite)


def all_rules() -> dict[str, type[Rule]]:
    """Every rule by name. Raises RuleError when two share a name or a code, naming both files."""
    rules, complete = _discovered()
    if not complete:
        _discovered.cache_clear()
    return rules


def refresh() -> None:
    """Look for rules anew at the next question, for tests and for plugins that arrive late."""
    _discovered.cache_clear()


@functools.cache
def _discovered() -> tuple[dict[str, type[Rule]], bool]:
    """The rules, and whether all of them: a plugin that is just being imported (it imports us) is not there yet."""
    found: dict[str, type[Rule]] = {}
    codes: dict[str, type[Rule]] = {}
    points = list(entry_points(group=ENTRY_POINTS))
    ready = [point for point in points if not _half_imported(point.module)]
    for rule in [*_of_folders(), *_of_plugins(ready)]:
        for table, key, what in ((found, rule.name, "name"), (codes, rule.code, "code")):
            if key in table and table[key] is not rule:
                raise RuleError(f"{what} '{key}' is claimed by {_file(table[key])} and by {_file(rule)}; "
                                f"expected one rule for each {what}")
            table[key] = rule
    return dict(sorted(found.items())), len(ready) == len(points)


def rewrites() -> dict[str, type[Rewrite]]:
    """The rules that know their fix, by name."""
    return {name: rule for name, rule in all_rules().items() if issubclass(rule, Rewrite)}


def by_name(name: str) -> type[Rewrite]:
    """The rewrite called `name` (with or without `ane::`). Raises InputError with the nearest name."""
    known = rewrites()
    short = name.removeprefix("ane::")
    if short not in known:
        coded = next((f"; did you mean '{rule.name}'?" for rule in known.values()
                      if name.lower() in (rule.code.lower(), rule.slug)), "")
        raise InputError(f"no pass '{name}'; `mil-ane-passes passes` lists them{coded or nearest(short, known)}")
    return known[short]


def explainable(key: str) -> type[Rule]:
    """The rule with this code, slug or name, in any case. Raises InputError with the nearest."""
    names: dict[str, type[Rule]] = {}
    for rule in all_rules().values():
        names.update({rule.code.lower(): rule, rule.slug: rule, rule.name: rule})
    wanted = key.lower().removeprefix("ane::")
    if wanted not in names:
        raise InputError(f"no rule '{key}'; `mil-ane-passes passes` lists codes and names{nearest(wanted, names)}")
    return names[wanted]


def _of_folders() -> Iterator[type[Rule]]:
    for folder in _FOLDERS:
        package = importlib.import_module(folder)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                yield from _rules_of(importlib.import_module(f"{folder}.{module.name}"), one=True)


def _half_imported(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _of_plugins(points: Iterable[EntryPoint]) -> Iterator[type[Rule]]:
    for point in points:
        loaded = point.load()
        yield from _rules_of(loaded) if isinstance(loaded, ModuleType) else [_named(loaded)]


def _rules_of(module: ModuleType, one: bool = False) -> list[type[Rule]]:
    """The rules a module defines (not those it imports)."""
    rules = [
        _named(value) for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Rule) and value not in _BASES
        and value.__module__ == module.__name__
    ]
    if one and len(rules) != 1:
        raise RuleError(f"{module.__file__} defines {len(rules)} rules; expected exactly one a file")
    return rules


def _named(rule: type[Rule]) -> type[Rule]:
    if not vars(rule).get("name"):
        rule.name = rule.__module__.rpartition(".")[2]
    for field in ("code", "slug", "evidence"):
        if not getattr(rule, field):
            raise RuleError(f"{_file(rule)} has no {field}; every rule states code, slug and evidence")
    return rule


def _file(rule: type[Rule]) -> str:
    return f"{rule.__name__} in {inspect.getsourcefile(rule)}"
