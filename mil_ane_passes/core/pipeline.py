"""Presets, order and options: which rewrites run, in which order, and the `ct.PassPipeline` that runs them."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Program
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass, PassOption
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY, register_pass

from .contract import STAGES, Rewrite, Rule
from .engine import PassTrace, run
from .errors import InputError, RuleError, nearest
from .guard import Guard, guarded
from .guard_passes import BEGIN, END, SETTLE, guarding, register_guard
from .options import parse_passes
from .query import all_ops
from .ranges import Measure
from .registry import by_name, rewrites
from .targets import parse_target

__all__ = ["PRESETS", "NAMESPACE", "Options", "Passes", "ordered", "pipeline", "register_passes", "run_all", "selected"]

PRESETS = ("safe", "full")
NAMESPACE = "ane"
Options = Mapping[str, Mapping[str, Any]]
"What options of passes are set to, by the name of the pass."
Passes = str | Iterable[str] | Mapping[str, Mapping[str, Any] | None]
"Passes as users name them: a text, several, or each with its options."
_MEASURE = "measure"
"The option by which a pass gets its `Measure`; coremltools' options are texts or callables."

_log = logging.getLogger("mil_ane_passes")


def ordered(names: Iterable[str]) -> list[str]:
    """`names` in pipeline order: by stage, then so that each follows what it names in `after`, then by name.

    Raises RuleError when `after` fields form a circle.
    """
    known = rewrites()
    waiting = sorted(set(names), key=lambda name: (STAGES.index(known[name].stage), name))
    done: list[str] = []
    while waiting:
        ready = [name for name in waiting if not set(known[name].after) & set(waiting)]
        if not ready:
            raise RuleError(f"the 'after' fields of {', '.join(waiting)} form a circle; expected an order")
        done.append(ready[0])
        waiting.remove(ready[0])
    return done


def selected(
    preset: str = "safe",
    passes: Passes | None = None,
    options: Options | None = None,
) -> list[Rewrite]:
    """The configured rewrites of a preset, or exactly those in `passes`, in order.

    `passes` is `'a,b{option=value}'`, a list of such, or a mapping from name to options; a preset's name among
    them stands for all its members. Raises InputError for anything unknown, with the nearest name.
    """
    if preset not in PRESETS:
        raise InputError(f"no preset '{preset}'; expected {' or '.join(PRESETS)}{nearest(preset, PRESETS)}")
    _check_kinds(passes, options)
    chosen: dict[str, dict[str, Any]] = {}
    named: set[str] = set()
    for name, settings in ({preset: {}} if passes is None else _pass_table(passes)).items():
        if name in PRESETS and settings:
            raise InputError(f"'{name}' is a preset and takes no options; expected them at one of its passes: "
                             f"{', '.join(_members(name))}")
        if name in PRESETS:
            chosen.update((member, chosen.get(member, {})) for member in _members(name))
        else:
            chosen.setdefault(by_name(name).name, {}).update(settings)
            named.add(by_name(name).name)
    for name, given in (options or {}).items():
        short = by_name(name).name
        if short not in chosen:
            raise InputError(f"options for 'ane::{short}', which is not among the passes {', '.join(chosen)}; add it")
        chosen[short].update(given or {})
    rules = [_configured(by_name(name), chosen[name]) for name in ordered(chosen)]
    for rule in rules:
        rule._asked = rule.name in named
    return rules


def _check_kinds(passes: Any, options: Any) -> None:
    """Raises InputError for what cannot be read as names of passes, or as their options."""
    names = passes is None or isinstance(passes, (str, Mapping)) or (
        isinstance(passes, Iterable) and not (
            isinstance(passes, Collection) and any(not isinstance(each, str) for each in passes)))
    if not names:
        raise InputError(f"passes: found {passes!r}; expected 'a,b{{option=value}}', a list of such, or a mapping from "
                         "name to options")
    if not (options is None or isinstance(options, Mapping)):
        raise InputError(f"options: found {options!r}; expected a mapping from the name of a pass to its options")
    for asked in (passes, options):
        for name, given in asked.items() if isinstance(asked, Mapping) else ():
            if not (given is None or isinstance(given, Mapping)):
                raise InputError(f"options of '{name}': found {given!r}; expected a mapping from option to value")


def run_all(
    rules: Iterable[Rewrite], program: Program, *, target: str = "all", measure: Measure | None = None,
    draw: Measure | None = None, guard: Guard | None = None,
) -> list[PassTrace]:
    """Run configured rewrites over a program, in place; one trace each.

    `measure` runs a program on what the user gave, `draw` on seeded draws, for rules that are content with those.
    `guard` undoes what it does not let stand; then there is a trace of that, besides.
    """
    return guarded(list(rules), program, partial(_run_all, target=target, measure=measure, draw=draw), guard)


def _run_all(
    rules: Iterable[Rewrite], program: Program, *, target: str, measure: Measure | None, draw: Measure | None,
) -> list[PassTrace]:
    traces: list[PassTrace] = []
    census: Counter[str] | None = None
    for rule in rules:
        if census is None:
            census = Counter(op.op_type for _, op in all_ops(program))
        if rule.roots and census.keys().isdisjoint(rule.roots):  # a walk over the whole program would find nothing
            ops = census.total() - census["const"]
            traces.append(PassTrace(rule.name, ops_before=ops, ops_after=ops))
            continue
        ruler = measure or (draw if rule.drawn else None)
        traces.append(run(rule, program, target=target, measure=ruler))
        if traces[-1].fired:
            census = None
    return traces


def pipeline(
    base: ct.PassPipeline | None = None,
    *,
    preset: str = "safe",
    target: str = "all",
    passes: Passes | None = None,
    options: Options | None = None,
    measure: Measure | None = None,
    draw: Measure | None = None,
    guard: Guard | None = None,
) -> ct.PassPipeline:
    """coremltools' pipeline `base` (default: `ct.PassPipeline.DEFAULT`) followed by our passes, as a new object.

    Ours come last, so that nothing of the host's folds them back (`fuse_conv_bias` would). `base` is never changed;
    a base that holds our passes already gets them anew, not twice. Names, options, preset and target are checked
    here, and a wrong one raises InputError with the nearest right one. `measure`, `draw` and `guard` as for `run_all`;
    what a guard undoes is what ours did between `ane::guard_begin` and `ane::guard_end`.
    """
    _check_base(base)
    parse_target(target)
    rules = selected(preset, passes, options)
    register_passes()
    result = copy.deepcopy(base) if base is not None else ct.PassPipeline.DEFAULT
    ours = {name for name in result.passes if name.startswith(f"{NAMESPACE}::")}
    result.remove_passes(ours)
    for name in ours:
        result.get_all_options().pop(name, None)
    settle = guarding(rules, partial(_run_all, target=target, measure=measure, draw=draw), guard)
    if settle is not None:
        result.append_pass(f"{NAMESPACE}::{BEGIN}")
    for rule in rules:
        result.append_pass(f"{NAMESPACE}::{rule.name}")
        settings = _settings(rule, target, measure or (draw if rule.drawn else None))
        if settings:
            result.set_options(f"{NAMESPACE}::{rule.name}", settings)
    if settle is not None:
        result.append_pass(f"{NAMESPACE}::{END}")
        result.set_options(f"{NAMESPACE}::{END}", {SETTLE: settle})
    return result


def _check_base(base: Any) -> None:
    if not (base is None or isinstance(base, ct.PassPipeline)):
        meant = f"; did you mean preset={base!r}?" if base in PRESETS else ""
        raise InputError(f"base: found {base!r}; expected a ct.PassPipeline, or None for coremltools' default{meant}")


def _settings(rule: Rewrite, target: str, ruler: Measure | None) -> dict[str, Any]:
    """The options of the pass for `rule`: what is not as it is unasked."""
    settings: dict[str, Any] = {name: str(getattr(rule, name)) for name, option in rule.options().items()
                                if getattr(rule, name) != option.default}
    if target != "all":
        settings["target"] = target
    if rule.measures and ruler is not None:
        settings[_MEASURE] = ruler
    return settings


def register_passes() -> None:
    """Register every rewrite with coremltools as `ane::<name>`; doing so twice is harmless."""
    register_guard()
    for name, rule in rewrites().items():
        if f"{NAMESPACE}::{name}" not in PASS_REGISTRY:
            register_pass(namespace=NAMESPACE, name=name)(_graph_pass(name, rule))


def _graph_pass(name: str, rule: type[Rewrite]) -> type[AbstractGraphPass]:
    """The coremltools side of a rewrite. The class carries the pass's name: coremltools prints it into op scopes."""

    def __init__(self: Any) -> None:
        self.settings = {}
        self.target = "all"
        self.measure = None

    def set_options(self: Any, pass_options: list[PassOption] | None = None) -> None:
        given = {option.option_name: option.option_val for option in pass_options or []}
        self.target = given.pop("target", "all")
        self.measure = given.pop(_MEASURE, None)
        parse_target(self.target)
        _configured(rule, given)
        self.settings = given

    def apply(self: Any, prog: Program) -> None:
        trace = run(_configured(rule, self.settings), prog, target=self.target, measure=self.measure)
        for finding in trace.fired:
            where = f" ({finding.origin})" if finding.origin else ""
            _log.info("ane::%s at %s%s: %s", name, finding.value, where, finding.note)

    members = {"__init__": __init__, "set_options": set_options, "apply": apply, "__doc__": rule.__doc__,
               "__module__": rule.__module__}
    return type(name, (AbstractGraphPass,), members)


def _configured(rule: type[Rewrite], values: Mapping[str, Any]) -> Rewrite:
    made: Rule = rule.configured(**values)
    assert isinstance(made, Rewrite)
    return made


def _members(preset: str) -> list[str]:
    presets = ("safe",) if preset == "safe" else ("safe", "full")
    return [name for name, rule in rewrites().items() if rule.preset in presets]


def _pass_table(passes: Passes) -> dict[str, dict[str, Any]]:
    if isinstance(passes, str) and not passes.strip():
        raise InputError("passes: no name given; expected names like 'a,b{option=value}'")
    if isinstance(passes, str):
        return dict(parse_passes(passes))
    if isinstance(passes, Mapping):
        return {name.removeprefix("ane::"): dict(given or {}) for name, given in passes.items()}
    table: dict[str, dict[str, Any]] = {}
    for item in passes:
        for name, given in parse_passes(item).items():
            table.setdefault(name, {}).update(given)
    return table
