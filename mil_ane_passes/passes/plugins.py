"""Plugins: rules of other distributions, found by entry point. Unusable ones are skipped with a warning.

A distribution names its modules or classes in the group `mil_ane_passes.rules`:

    [project.entry-points."mil_ane_passes.rules"]
    double_relu = "my_rules.double_relu"

A module contributes every rule that it defines, except classes whose name starts with an underscore: those are bases.
A rule without a `name` of its own has the name of its class in snake case. A rewrite joins the preset that it declares
as soon as its distribution is installed. See `passes/rule_class.py` for the required fields of a rule and the free
codes, and `mil_ane_passes.testing` for its tests.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from ..utils.text_format import escape_text
from .contract import Rule
from .coremltools_setup import ENTRY_POINT_GROUP
from .rule_class import RULE_BASE_CLASSES, assign_default_name, find_flaw, format_class_location, shares_code

__all__ = ["ENTRY_POINT_GROUP", "SkippedPlugin", "find_rules_in_module", "load_plugin_rules"]

_log = logging.getLogger("mil_ane_passes")


@dataclass(frozen=True)
class SkippedPlugin:
    """A skipped part of a plugin: its distribution, the part, and the reason."""

    distribution: str
    what: str
    why: str

    def __str__(self) -> str:
        return (f"plugin {self.distribution}: {self.what} is skipped: {self.why}. Everything else works; fix, update "
                f"or uninstall {self.distribution.partition(' ')[0]}")


def find_rules_in_module(module: ModuleType) -> list[type[Rule]]:
    """Find the rules that a module defines, each once; not those it imports, nor bases (`_Name`)."""
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Rule)
             and value not in RULE_BASE_CLASSES and value.__module__ == module.__name__]
    return [rule for rule in dict.fromkeys(found) if not rule.__name__.startswith("_")]


def load_plugin_rules(ours: Mapping[str, type[Rule]]) -> tuple[dict[str, type[Rule]], list[SkippedPlugin], bool]:
    """Load the rules of plugins. Returns them by name, the skipped parts, and whether all plugins were loaded.

    A plugin that is just being imported (it imports us) is not available yet. If two rules have the same name, code or
    slug, ours wins, else the one of the distribution that comes first by name.
    """
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (_format_distribution(point), point.name))
    ready = [point for point in points if not _is_being_imported(point.module)]
    found: dict[str, type[Rule]] = {}
    left: list[SkippedPlugin] = []
    owner: dict[str, str] = {}
    for point in ready:
        for rule in _iterate_offered_rules(point, left):
            if rule in found.values():
                continue
            why = find_flaw(rule, ours=False) or _find_clash(rule, [*ours.values(), *found.values()])
            if why:
                left.append(SkippedPlugin(_format_distribution(point), format_class_location(rule), f"it {why}"))
            else:
                found[rule.name] = rule
                owner[rule.name] = _format_distribution(point)
    for rule in _find_cyclic_rules(found):
        del found[rule.name]
        left.append(
            SkippedPlugin(
                owner[rule.name], format_class_location(rule), f"its after={rule.after!r} forms a cycle"
            )
        )
    for each in left:
        _warn_once(str(each))
    return found, left, len(ready) == len(points)


def _iterate_offered_rules(point: EntryPoint, left: list[SkippedPlugin]) -> Iterator[type[Rule]]:
    """Yield the rules of an entry point; parts that cannot be loaded are added to `left`."""
    what = f"entry point '{point.name} = {point.value}'"
    try:
        loaded: Any = point.load()
    except (Exception, SystemExit) as error:  # a plugin's module may raise anything when it is imported
        left.append(
            SkippedPlugin(_format_distribution(point), what, f"importing it fails ({type(error).__name__}: {error})")
        )
        return
    rules = find_rules_in_module(loaded) if isinstance(loaded, ModuleType) else [loaded]
    if not all(inspect.isclass(rule) and issubclass(rule, Rule) and rule not in RULE_BASE_CLASSES for rule in rules):
        why = (f"found {loaded!r}; expected a module, or a subclass of mil_ane_passes.passes.contract.Rule or Rewrite")
        left.append(SkippedPlugin(_format_distribution(point), what, why))
    elif not rules:
        left.append(
            SkippedPlugin(
                _format_distribution(point), what, "the module defines no rule (imported ones do not count)"
            )
        )
    else:
        yield from map(assign_default_name, rules)


def _find_clash(rule: type[Rule], known: Iterable[type[Rule]]) -> str:
    """Return a message if `rule` has the name, code or slug of a known rule, else an empty text."""
    for other in known:
        for what in ("name", "code", "slug"):
            key = getattr(rule, what)
            if key == getattr(other, what) and (what == "name" or not shares_code(rule)):
                hint = f"expected a unique {what}{' (set `name` on the class)' if what == 'name' else ''}"
                return f"has {what} '{key}', which {format_class_location(other)} already has; {hint}"
    return ""


def _find_cyclic_rules(rules: Mapping[str, type[Rule]]) -> list[type[Rule]]:
    """Find the rules whose `after` fields form a cycle, directly or through other rules."""
    waiting = dict(rules)
    while free := [name for name, rule in waiting.items() if not set(rule.after) & set(waiting)
                   or not any(name in other.after for other in waiting.values())]:
        for name in free:
            del waiting[name]
    return list(waiting.values())


def _format_distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "of unknown name"


def _is_being_imported(module: str) -> bool:
    """Return whether `module`, or a package that contains it, is being imported."""
    parts = module.split(".")
    around = (sys.modules.get(".".join(parts[:number])) for number in range(1, len(parts) + 1))
    return any(getattr(getattr(each, "__spec__", None), "_initializing", False) for each in around)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", escape_text(text))
