"""Pipelines: presets, pass order and options, and the `ct.PassPipeline` that runs the selected rewrites."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Program
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass, PassOption
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY, register_pass

from ..ir.value_ranges import Measure
from ..utils.errors import InputError, RuleError, suggest_nearest
from ..utils.locking import synchronized
from ..utils.text_format import escape_text
from .contract import STAGES, Rewrite, Rule
from .corrected_passes import correct_names
from .engine import PassTrace, RunSettings, append_repeated, try_rewrite
from .guard import Guard, run_guarded
from .guard_passes import (
    BEGIN_PASS,
    END_PASS,
    UNDO_OPTION,
    Session,
    get_session,
    make_undo_callback,
    register_guard_passes,
)
from .max_growth import DEFAULT_MAX_GROWTH, check_max_growth
from .options import Option, parse_passes
from .pass_names import format_pass_name, install_lookup
from .registry import find_rewrite, get_all_rewrites
from .targets import parse_target

__all__ = [
    "NAMESPACE",
    "PRESETS",
    "Options",
    "Passes",
    "apply_rewrites",
    "pipeline",
    "register_passes",
    "select_rewrites",
    "treat_as_preset",
    "sort_passes",
]

PRESETS = ("safe", "full")
NAMESPACE = "ane"
Options = Mapping[str, Mapping[str, Any]]
"Option values of passes, by pass name."
Passes = str | Iterable[str] | Mapping[str, Mapping[str, Any] | None]
"Passes in the forms that users may write: a text, several texts, or a mapping from each to its options."
_MEASURE_OPTION = "measure"
"Name of the option that passes a `Measure` to a pass; coremltools' options are texts or callables."

_PRESET_SETTINGS = ("target", "max_growth", "strict")
_PASS_SETTINGS = frozenset({"target", "strict"})
_BEGIN_SETTINGS = (*_PRESET_SETTINGS, _MEASURE_OPTION, "requested")
MakeGuard = Callable[[str, float], Guard | None]
_GUARD_FACTORY: list[MakeGuard | None] = [None]
"""Factory of the guard for a target and a maximum cost increase.

Registered by the packages above this one, which know the prediction.
"""
_STRICT_OPTION = "strict"
"Name of the option with which a failing pass stops the conversion."

_log = logging.getLogger("mil_ane_passes")


def sort_passes(names: Iterable[str]) -> list[str]:
    """Sort `names` in pipeline order: by stage, then each after the names in its `after`, then by name.

    Raises RuleError when `after` fields form a cycle.
    """
    known = get_all_rewrites()
    waiting = sorted(set(names), key=lambda name: (STAGES.index(known[name].stage), name))
    done: list[str] = []
    while waiting:
        ready = [name for name in waiting if not set(known[name].after) & set(waiting)]
        if not ready:
            raise RuleError(f"the 'after' fields of {', '.join(waiting)} form a cycle; expected an order")
        done.append(ready[0])
        waiting.remove(ready[0])
    return done


def select_rewrites(
    preset: str = "safe",
    passes: Passes | None = None,
    options: Options | None = None,
) -> list[Rewrite]:
    """Select the configured rewrites of a preset, or exactly those in `passes`, in order.

    `passes` is `'a,b{option=value}'`, a list of such, or a mapping from name to options; a preset's name among them
    stands for all its members. Raises InputError for anything unknown, with the nearest name.
    """
    if preset not in PRESETS:
        raise InputError(f"no preset '{preset}'; expected {' or '.join(PRESETS)}{suggest_nearest(preset, PRESETS)}")
    _check_argument_types(passes, options)
    chosen: dict[str, dict[str, Any]] = {}
    named: set[str] = set()
    for name, settings in ({preset: {}} if passes is None else _parse_pass_table(passes)).items():
        if name in PRESETS and settings:
            raise InputError(f"'{name}' is a preset, which has no options; set them at one of its passes: "
                             f"{', '.join(_list_preset_members(name))}")
        if name in PRESETS:
            chosen.update((member, chosen.get(member, {})) for member in _list_preset_members(name))
        else:
            chosen.setdefault(find_rewrite(name).name, {}).update(settings)
            named.add(find_rewrite(name).name)
    for name, inputs in (options or {}).items():
        short = find_rewrite(name).name
        if short not in chosen:
            raise InputError(f"options for 'ane::{short}', which is not one of the passes {', '.join(chosen)}; add it "
                             f"to the passes")
        chosen[short].update(inputs or {})
    rules = [_configure_rewrite(find_rewrite(name), chosen[name]) for name in sort_passes(chosen)]
    for rule in rules:
        rule._asked = rule.name in named
    return rules


def treat_as_preset(rules: Iterable[Rewrite]) -> None:
    """Treat rewrites as members of a preset, where something else than the user has named them."""
    for rule in rules:
        rule._asked = False


def _check_argument_types(passes: Any, options: Any) -> None:
    """Raise InputError for values that cannot be read as names of passes, or as their options."""
    names = passes is None or isinstance(passes, (str, Mapping)) or (
        isinstance(passes, Iterable) and not (
            isinstance(passes, Collection) and any(not isinstance(each, str) for each in passes)))
    if not names:
        raise InputError(f"passes: found {passes!r}; expected 'a,b{{option=value}}', a list of such, or a mapping from "
                         "name to options")
    if not (options is None or isinstance(options, Mapping)):
        raise InputError(f"options: found {options!r}; expected a mapping from the name of a pass to its options")
    for requested in (passes, options):
        for name, inputs in requested.items() if isinstance(requested, Mapping) else ():
            if not (inputs is None or isinstance(inputs, Mapping)):
                raise InputError(f"options of '{name}': found {inputs!r}; expected a mapping from option to value")


def apply_rewrites(
    rules: Iterable[Rewrite], program: Program, *, target: str = "all", measure: Measure | None = None,
    draw: Measure | None = None, guard: Guard | None = None, strict: bool = False,
) -> list[PassTrace]:
    """Run configured rewrites over a program, in place; returns one trace each.

    `measure` runs a program on the user's feeds, `draw` on seeded random feeds, for rules that accept them. `guard`
    reverts the rewrites that it does not allow; each of these has an additional trace. A rule of a preset that fails
    leaves the program unchanged, and its trace has the position and the reason (`failed`). A rule that was requested
    by name, or any rule with `strict`, raises RuleError.
    """
    return run_guarded(list(rules), program, RunSettings(target, measure, draw, strict), guard)


def pipeline(
    base: ct.PassPipeline | None = None, *, preset: str = "safe", target: str = "all",
    passes: Passes | None = None, options: Options | None = None, measure: Measure | None = None,
    draw: Measure | None = None, guard: Guard | None = None, strict: bool = False,
) -> ct.PassPipeline:
    """Build a new pipeline: coremltools' `base` (default: `ct.PassPipeline.DEFAULT`) followed by our passes.

    Ours come last, so that no pass of coremltools folds them back (`fuse_conv_bias` would). `base` is never changed.
    Where coremltools' own pass changes results or fails, the corrected one of `corrected_passes` runs under its name.
    Our passes in `base` are replaced, not duplicated. Names, options, preset and target are checked here, and an
    invalid one raises an InputError that suggests the nearest valid one. `measure`, `draw`, `guard` and `strict` as for
    `apply_rewrites`; a guard reverts only changes of our passes between `ane::guard_begin` and `ane::guard_end`. A pass
    that fails leaves the program unchanged and logs a warning, unless `strict`.
    """
    _check_base_pipeline(base)
    parse_target(target)
    rules = select_rewrites(preset, passes, options)
    register_passes()
    result = _copy_without_own_passes(base)
    settings_again = RunSettings(target, measure, draw, strict, stops_at_requested=False)
    settle = make_undo_callback(rules, settings_again, guard)
    carried = _collect_pipeline_settings(rules, target, strict, measure is not None, None if settle is None else guard)
    if carried:
        result.append_pass(format_pass_name(BEGIN_PASS, carried))
    for rule in append_repeated(rules):
        result.append_pass(f"{NAMESPACE}::{rule.name}")
        settings = _collect_pass_settings(rule, target, measure or (draw if rule.accepts_sampled else None), strict)
        if settings:
            result.get_all_options().pop(f"{NAMESPACE}::{rule.name}", None)  # coremltools warns where they are replaced
            result.set_options(f"{NAMESPACE}::{rule.name}", settings)
    if carried:
        result.append_pass(f"{NAMESPACE}::{END_PASS}")
    if settle is not None:
        result.set_options(f"{NAMESPACE}::{END_PASS}", {UNDO_OPTION: settle})
    return result


def _collect_pipeline_settings(
    rules: Iterable[Rewrite], target: str, strict: bool, is_measured: bool, guard: Guard | None,
) -> dict[str, str]:
    """Collect the settings in the name of the first pass, with which the names alone do the same.

    The result is empty without settings.
    """
    found = {} if guard is None else {"max_growth": repr(guard.most)}
    found |= {"target": target} if target != "all" else {}
    found |= {_STRICT_OPTION: "true"} if strict else {}
    found |= {_MEASURE_OPTION: "true"} if is_measured and any(rule.measures for rule in rules) else {}
    found |= {f"{rule.name}.{name}": str(value) for rule in rules for name, value in _get_changed_options(rule).items()}
    requested = [rule.name for rule in rules if rule.asked and rule.preset == "full"]
    return found | ({"requested": "+".join(requested)} if guard is not None and requested else {})


def _validate_remaining_passes(self: ct.PassPipeline) -> None:
    """Drop the options of our passes that the user removed, and check the rest as coremltools does.

    coremltools keeps the options of a pass that is removed, and then rejects the pipeline because of them.
    """
    options = self.get_all_options()
    for name in [name for name in options if name.startswith(f"{NAMESPACE}::") and name not in self.passes]:
        del options[name]
    ct.PassPipeline.validate(self)


_Pipeline = type("_Pipeline", (ct.PassPipeline,), {"validate": _validate_remaining_passes, "__module__": __name__})
"A pipeline from which passes of ours can be removed."


def _copy_without_own_passes(base: ct.PassPipeline | None) -> ct.PassPipeline:
    """Copy `base` without our passes and their options, and with corrected passes of coremltools."""
    source = copy.deepcopy(base) if base is not None else ct.PassPipeline.DEFAULT
    result = _Pipeline(correct_names(source.passes), source.pipeline_name)
    result.get_all_options().update(source.get_all_options())
    ours = {name for name in result.passes if name.startswith(f"{NAMESPACE}::")}
    result.remove_passes(ours)
    for name in ours:
        result.get_all_options().pop(name, None)
    return result


def _check_base_pipeline(base: Any) -> None:
    if not (base is None or isinstance(base, ct.PassPipeline)):
        meant = f"; did you mean preset={base!r}?" if base in PRESETS else ""
        raise InputError(f"base: found {base!r}; expected a ct.PassPipeline, or None for coremltools' default{meant}")


def _collect_pass_settings(rule: Rewrite, target: str, measure_ranges: Measure | None, strict: bool) -> dict[str, Any]:
    """Collect the options of the pass for `rule` that differ from the default."""
    settings: dict[str, Any] = dict(_get_changed_options(rule))
    if target != "all":
        settings["target"] = target
    if strict:
        settings[_STRICT_OPTION] = "true"
    if rule.measures and measure_ranges is not None:
        settings[_MEASURE_OPTION] = measure_ranges
    return settings


def _get_changed_options(rule: Rewrite) -> dict[str, str]:
    """Return the options of `rule` that differ from the default."""
    return {name: str(getattr(rule, name)) for name, option in rule.options().items()
            if getattr(rule, name) != option.default}


def register_passes(guard: MakeGuard | None = None) -> None:
    """Register every rewrite with coremltools as `ane::<name>`; calling this twice is harmless.

    `guard` makes the guard of a target, for pipelines that were passed on by name only.
    """
    if guard is not None:
        _GUARD_FACTORY[0] = guard
    register_guard_passes(_restore_undo_callback)
    install_lookup(_find_pass_class)
    for name, rule in get_all_rewrites().items():
        if f"{NAMESPACE}::{name}" not in PASS_REGISTRY:
            register_pass(namespace=NAMESPACE, name=name)(_make_graph_pass(name, rule))


def _make_graph_pass(name: str, rule: type[Rewrite]) -> type[AbstractGraphPass]:
    """Make the coremltools pass of a rewrite.

    The class has the pass's name because coremltools prints it into op scopes.
    """

    def __init__(self: Any) -> None:
        self.set_options()

    def set_options(self: Any, pass_options: list[PassOption] | None = None) -> None:
        inputs = {**self.carried, **{option.option_name: option.option_val for option in pass_options or []}}
        self.supplied = frozenset(inputs)
        self.target = inputs.pop("target", "all")
        self.measure = inputs.pop(_MEASURE_OPTION, None)
        self.strict = Option(_STRICT_OPTION, bool, False).parse(
            inputs.pop(_STRICT_OPTION, False), f"{NAMESPACE}::{name}"
        )
        parse_target(self.target)
        _configure_rewrite(rule, inputs)
        self.settings = inputs

    @synchronized
    def apply_pass(self: Any, prog: Program) -> None:
        configured, target, strict = _configure_from_session(self, rule, prog)
        trace = try_rewrite(configured, prog, target, self.measure, strict)
        _log_trace(trace)

    members: dict[str, Any] = {"__init__": __init__, "set_options": set_options, "apply": apply_pass,
                               "__doc__": rule.__doc__, "__module__": rule.__module__, "carried": {}}
    return type(name, (AbstractGraphPass,), members)


def _configure_from_session(self: Any, rule: type[Rewrite], program: Program) -> tuple[Rewrite, str, bool]:
    """Configure the rule of a pass; returns it with its target and whether it is strict.

    Settings of the pass itself come first, then those of the session's first pass.
    """
    session = get_session(program)
    if session is None:
        return _configure_rewrite(rule, self.settings), self.target, self.strict
    configured = _configure_rewrite(rule, {**session.of(rule.name), **self.settings})
    configured._asked = rule.name in session.requested
    if all(rule.name != earlier.name for earlier in session.applied_rules):
        session.applied_rules.append(configured)
    if rule.measures and self.measure is None and _MEASURE_OPTION in session.settings:
        _log.warning("ane::%s does not have the feeds and ranges of the pipeline, because pass names cannot contain "
                     "them", rule.name)
    target = self.target if "target" in self.supplied else session.settings.get("target", "all")
    return configured, target, self.strict or _is_strict(session.settings)


def _is_strict(settings: Mapping[str, str]) -> bool:
    found: bool = Option(_STRICT_OPTION, bool, False).parse(
        settings.get(_STRICT_OPTION, False), f"{NAMESPACE}::{BEGIN_PASS}"
    )
    return found


def _restore_undo_callback(session: Session) -> Callable[[Program, Program], None] | None:
    """Recreate the guard callback of a pipeline that was passed on by name only."""
    share, target = _read_max_growth(BEGIN_PASS, session.settings), session.settings.get("target", "all")
    if "max_growth" not in session.settings or share is None or _GUARD_FACTORY[0] is None:
        return None
    strict = _is_strict(session.settings)
    settings = RunSettings(target, strict=strict, stops_at_requested=False)
    return make_undo_callback(session.applied_rules, settings, _GUARD_FACTORY[0](target, share))


def _find_pass_class(name: str, settings: Mapping[str, str]) -> type[AbstractGraphPass] | None:
    """Find the pass for a name with settings; None for a name that is not ours.

    Raises InputError for wrong settings.
    """
    pass_id = format_pass_name(name, settings)
    if name in PRESETS:
        return _make_preset_pass(pass_id, name, settings)
    known = dict.get(PASS_REGISTRY.passes, f"{NAMESPACE}::{name}")
    if known is None or not settings or name == END_PASS:
        return None
    if name == BEGIN_PASS:
        _check_pipeline_settings(pass_id, settings)
    else:
        parse_target(settings.get("target", "all"))
        _configure_rewrite(
            get_all_rewrites()[name], {key: value for key, value in settings.items() if key not in _PASS_SETTINGS}
        )
    return type(known.__name__, (known,), {"carried": dict(settings), "__module__": known.__module__})


def _check_pipeline_settings(pass_id: str, settings: Mapping[str, str]) -> None:
    parse_target(settings.get("target", "all"))
    _read_max_growth(pass_id, settings)
    for key, value in settings.items():
        rule, dot, option = key.partition(".")
        if dot:
            _configure_rewrite(find_rewrite(rule), {option: value})
        elif key not in _BEGIN_SETTINGS:
            raise InputError(f"{pass_id}: no setting '{key}'; expected {', '.join(_BEGIN_SETTINGS)} or PASS.OPTION"
                             f"{suggest_nearest(key, _BEGIN_SETTINGS)}")


def _read_max_growth(pass_id: str, settings: Mapping[str, str]) -> float | None:
    """Read the share by which the guard lets the predicted cost grow; None for no guard."""
    said = settings.get("max_growth", str(DEFAULT_MAX_GROWTH))
    try:
        return None if said.lower() == "none" else check_max_growth(float(said))
    except ValueError:
        raise InputError(f"{pass_id}: found max_growth={said}; expected a share such as 0.01, or none") from None


def _make_preset_pass(pass_id: str, preset: str, settings: Mapping[str, str]) -> type[AbstractGraphPass]:
    """Make one pass that runs the passes of the preset, with their guard."""
    for key in settings:
        if key not in _PRESET_SETTINGS:
            raise InputError(f"{pass_id}: no setting '{key}'; expected {', '.join(_PRESET_SETTINGS)}"
                             f"{suggest_nearest(key, _PRESET_SETTINGS)}")
    target, strict = settings.get("target", "all"), _is_strict(settings)
    parse_target(target)
    share = _read_max_growth(pass_id, settings)

    def apply_pass(self: Any, prog: Program) -> None:
        guard = None if share is None or _GUARD_FACTORY[0] is None else _GUARD_FACTORY[0](target, share)
        for trace in apply_rewrites(select_rewrites(preset), prog, target=target, guard=guard, strict=strict):
            _log_trace(trace)

    doc = f"The preset {preset} as one pass."
    return type(preset, (AbstractGraphPass,), {"apply": apply_pass, "__doc__": doc, "__module__": __name__})


def _log_trace(trace: PassTrace) -> None:
    """Log the changes of a rule to the program of a conversion."""
    if trace.failed:
        _log.warning("ane::%s failed %s; its changes are rolled back, and the other passes run", trace.rule,
                     escape_text(str(trace.failed)))
    if trace.reverted:
        _log.info("ane::%s reverted: %s", trace.rule, escape_text(trace.reverted))
    for finding in trace.fired:
        where = f" ({finding.origin})" if finding.origin else ""
        _log.info("ane::%s at %s", trace.rule, escape_text(f"{finding.value}{where}: {finding.reason}"))


def _configure_rewrite(rule: type[Rewrite], values: Mapping[str, Any]) -> Rewrite:
    built: Rule = rule.configured(**values)
    assert isinstance(built, Rewrite)
    return built


def _list_preset_members(preset: str) -> list[str]:
    presets = ("safe",) if preset == "safe" else ("safe", "full")
    return [name for name, rule in get_all_rewrites().items() if rule.preset in presets]


def _parse_pass_table(passes: Passes) -> dict[str, dict[str, Any]]:
    if isinstance(passes, str) and not passes.strip():
        raise InputError("passes: no name given; expected names like 'a,b{option=value}'")
    if isinstance(passes, str):
        return dict(parse_passes(passes))
    if isinstance(passes, Mapping):
        return {name.removeprefix("ane::"): dict(inputs or {}) for name, inputs in passes.items()}
    table: dict[str, dict[str, Any]] = {}
    for item in passes:
        for name, inputs in parse_passes(item).items():
            table.setdefault(name, {}).update(inputs)
    return table
