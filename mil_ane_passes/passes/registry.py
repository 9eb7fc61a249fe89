"""Registry of rules: those in every module of `rules/` and `rewrites/`, and those of third parties.

A new rule or file is found without editing a list: a module of `rules/` holds the rules about one subject, a module of
`rewrites/` one rewrite, after which it is named. A third party names a module or a class under the entry point group
`mil_ane_passes.rules`; see `plugins`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator

from ..utils.errors import InputError, RuleError, suggest_nearest
from .contract import STAGES, Rewrite, Rule
from .plugins import ENTRY_POINT_GROUP, SkippedPlugin, find_rules_in_module, load_plugin_rules
from .rule_class import assign_default_name, find_flaw, format_class_location, shares_code
from .rule_lookup import RuleKeys, find_rule_name

__all__ = [
    "ENTRY_POINT_GROUP",
    "find_rewrite",
    "find_rule",
    "fixes_for",
    "get_all_rewrites",
    "get_all_rules",
    "get_skipped_plugins",
    "mention_skipped_plugins",
    "reset_registry",
]

_RULES, _REWRITES = "mil_ane_passes.rules", "mil_ane_passes.rewrites"
"Our packages of rules, with several in a module, and of rewrites, with one in a module."


def get_all_rules() -> dict[str, type[Rule]]:
    """Return every rule by name. Raises RuleError when two of ours share a name or a code, naming both files."""
    return _get_discovered_rules()[0]


def get_skipped_plugins() -> list[SkippedPlugin]:
    """Return the skipped parts of plugins with the reasons, which were logged when they were found."""
    return _get_discovered_rules()[1]


def reset_registry() -> None:
    """Discard the found rules, so that the next query searches again: for tests, and for plugins installed late."""
    _discover_rules.cache_clear()


def _get_discovered_rules() -> tuple[dict[str, type[Rule]], list[SkippedPlugin]]:
    rules, left, complete = _discover_rules()
    if not complete:
        _discover_rules.cache_clear()
    return rules, left


@functools.cache
def _discover_rules() -> tuple[dict[str, type[Rule]], list[SkippedPlugin], bool]:
    """Find all rules.

    Returns them, the skipped parts of plugins, and whether all plugins were loaded: one that is being imported is not
    available yet.
    """
    ours: dict[str, type[Rule]] = {}
    codes: dict[str, type[Rule]] = {}
    for rule in _iterate_own_rules():
        for table, key, what in ((ours, rule.name, "name"), (codes, rule.code, "code")):
            if what == "code" and shares_code(rule):
                continue
            if key in table:
                raise RuleError(
                    f"{what} '{key}' is used by {format_class_location(table[key])} and by "
                    f"{format_class_location(rule)}; expected one rule per {what}"
                )
            table[key] = rule
    other, left, complete = load_plugin_rules(ours)
    return dict(sorted({**ours, **other}.items())), left, complete


def get_all_rewrites() -> dict[str, type[Rewrite]]:
    """Return the rewrites by name."""
    return {name: rule for name, rule in get_all_rules().items() if issubclass(rule, Rewrite)}


def fixes_for(rule: type[Rule]) -> list[type[Rewrite]]:
    """Return the rewrites that fix the findings of `rule`, in pipeline order; a rewrite fixes its own findings."""
    if issubclass(rule, Rewrite):
        return [rule]
    found = [each for each in get_all_rewrites().values() if rule in each.fixes]
    return sorted(found, key=lambda each: (STAGES.index(each.stage), each.name))


def find_rewrite(name: str) -> type[Rewrite]:
    """Find the rewrite called `name` (with or without `ane::`). Raises InputError with the nearest name."""
    known = get_all_rewrites()
    short = name.removeprefix("ane::")
    if short not in known:
        fixes = dict.fromkeys(repr(fix.name) for rule in get_all_rules().values() for fix in fixes_for(rule)
                              if name.lower() in (rule.code.lower(), rule.slug, rule.name))
        coded = f"; did you mean {' or '.join(fixes)}?" if fixes else ""
        raise InputError(f"no pass '{name}'; `mil-ane-passes passes` lists them{coded or suggest_nearest(short, known)}"
                         f"{mention_skipped_plugins()}")
    return known[short]


def find_rule(key: str) -> type[Rule]:
    """Find the rule with this code, slug or name, in any case. Raises InputError with a suggestion."""
    rules = get_all_rules()
    keys = [RuleKeys(rule.name, rule.code, rule.slug, shares_code(rule)) for rule in rules.values()]
    return rules[find_rule_name(key, keys, mention_skipped_plugins())]


def _iterate_own_rules() -> Iterator[type[Rule]]:
    for folder in (_RULES, _REWRITES):
        package = importlib.import_module(folder)
        for module in pkgutil.walk_packages(package.__path__, f"{folder}."):
            if not module.ispkg and not module.name.rpartition(".")[2].startswith("_"):
                yield from _load_rule_module(module.name, single=folder == _REWRITES)


def _load_rule_module(module: str, *, single: bool) -> Iterator[type[Rule]]:
    """Yield the rules of a module; `single`: it has one, after which it is named."""
    loaded = importlib.import_module(module)
    rules = find_rules_in_module(loaded)
    if not rules or (single and len(rules) > 1):
        raise RuleError(f"{loaded.__file__} defines {len(rules)} rules; expected {'exactly' if single else 'at least'} "
                        "one a file")
    for rule in map(assign_default_name, rules):
        wrong = find_flaw(rule, ours=True, quick=True)
        if not wrong and single and rule.name != module.rpartition(".")[2]:
            wrong = f"has name '{rule.name}'; expected that of its file, which holds one rewrite"
        if wrong:
            raise RuleError(f"{format_class_location(rule)} {wrong}")
        yield rule


def mention_skipped_plugins() -> str:
    """Format a note on skipped plugins for an error about an unknown name, which may be a plugin's; empty if none."""
    names = sorted({each.distribution for each in get_skipped_plugins()})
    return f"; skipped are the rules of {', '.join(names)}" if names else ""
