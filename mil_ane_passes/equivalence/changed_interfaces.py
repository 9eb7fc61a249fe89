"""Equivalence across changes of the interface: `old(feeds)` is compared with `unmap(new(map(feeds)))`.

Functions with states run several steps. A transform may turn one function into several functions, each equivalent to
it, or into several parts that run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from coremltools.converters.mil.mil import Function, Program, types

from ..passes.contract import Exactness
from ..passes.interface_change import InterfaceMapping
from ..utils.errors import InputError
from ..utils.text_format import format_count
from .adversarial_feeds import oppose_feeds
from .comparison import OutputDifference, to_arrays
from .equivalence import Case, VerifyReport, judge_executions
from .execution import Execution, Plan, Run
from .feeds import (
    ShapeChoice,
    find_compared_values,
    get_symbol_sizes,
    list_shape_choices,
    make_feeds,
    make_state,
    place_at_end,
)
from .input_domains import infer_input_domains

__all__ = ["Adjust", "ChangedPart", "compare_across_interfaces", "hide_last_keys"]

Progress = Callable[[str], None]
Adjust = Callable[[dict[str, Any], ShapeChoice, int], dict[str, Any]]
"Returns the feeds of a run in place of random ones, for the shapes and the number of the run."


class RoundedValue(Protocol):
    """The value of a constant before it was rounded, and the largest difference that rounding explains."""

    @property
    def exact(self) -> Any: ...

    @property
    def error(self) -> float: ...


class ChangedPart(Protocol):
    """A program made by transforms, with the mapping from a source function to each of its functions.

    `rounded` has, by function and name, constants that transforms computed and rounded.
    """

    program: Program
    interfaces: dict[str, InterfaceMapping]

    @property
    def rounded(self) -> Mapping[str, Mapping[str, RoundedValue]]: ...


def compare_across_interfaces(
    before: Program, parts: Sequence[ChangedPart], *, seeds: int = 2, steps: int = 3,
    precisions: Sequence[str] = ("float64",), exactness: Exactness = Exactness.ROUNDING,
    describe: Callable[[str], Any] = lambda name: None, progress: Progress = lambda text: None,
    adjust: Adjust | None = None,
) -> VerifyReport:
    """Compare a program with the results of transforms, on random feeds, which `adjust` may replace.

    If there is one part, each of its functions corresponds to a function of `before`. Several parts run one after the
    other, and later parts read the outputs of earlier ones. A function with states runs `steps` times in sequence, with
    its own states, which are compared as well. Feeds and results are limited to values that both interfaces can hold.
    Removed and added outputs are not compared; the notes list them.

    The source computes tables of positions, for which the results have rounded constants, without rounding. In this
    comparison the results read the exact values, and the constants are compared with these by themselves.
    """
    old, new = Execution([]), Execution([])
    notes: dict[str, None] = {}
    constants: list[Case] = []
    for chain in _find_chains(parts):
        constants += _compare_constants(chain)
        name = chain.mappings[0].function
        for number, choices in enumerate(_list_choices(before.functions[name], chain, describe(name), seeds, steps)):
            progress(f"{chain.label}, seed {number}")
            for precision in precisions:
                runs = _run_steps(before, chain, choices, number, precision, describe(name), adjust)
                for first, second in runs:
                    _merge_run(old, first, precision)
                    _merge_run(new, second, precision)
        notes |= dict.fromkeys(_describe_left_out(chain))
    if not old.runs:
        raise InputError("there is no function to compare; expected functions made of those of the source")
    report = judge_executions(old, new, exactness)
    report.notes += notes
    count = sum(len(case.outputs) for case in constants)
    if count:
        report.notes.append(f"{format_count(count, 'constant')} computed from sizes: compared with exact values before "
                            "rounding, which the runs then read")
    report.cases += [case for case in constants if not case.passed]
    if not all(case.passed for case in constants):
        report.status = "different"
    return report


def _compare_constants(chain: _Chain) -> Iterator[Case]:
    """Yield the comparison of rounded constants with their exact values: one rounding and the stated error are allowed.
    """
    for (program, name), rounded in zip(chain.parts, chain.rounded, strict=True):
        found = [_compare_constant(op.outputs[0], rounded[op.outputs[0].name])
                 for op in program.functions[name].operations
                 if op.op_type == "const" and op.outputs[0].name in rounded]
        if found:
            yield Case(name, "constants", "float64", found)


def _compare_constant(var: Any, value: RoundedValue) -> OutputDifference:
    stored, exact = np.asarray(var.val), np.asarray(value.exact, np.float64)
    if stored.shape != exact.shape:
        reason = f"has the shape {stored.shape}; expected {exact.shape}"
        return OutputDifference(var.name, False, False, reason=reason)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = exact.astype(stored.dtype)
        apart = np.where((stored == nearest) | np.isnan(stored) & np.isnan(exact), 0.0, np.abs(stored - exact))
        allowed = np.where(np.isfinite(nearest), np.spacing(np.abs(nearest)), 0.0).astype(np.float64) + value.error
        excess = np.nan_to_num(apart - allowed, nan=np.inf)
    worst = np.unravel_index(int(np.argmax(excess)), exact.shape)
    return OutputDifference(
        var.name, bool(np.array_equal(stored, nearest, equal_nan=True)), bool(excess[worst] <= 0),
        absolute=float(apart[worst]), index=tuple(map(int, worst)), before=float(exact[worst]),
        after=float(stored[worst]), allowed=float(allowed[worst]))


def hide_last_keys(
    masks: Container[str], shown: int, feeds: Mapping[str, Any], choice: ShapeChoice, number: int
) -> dict[str, Any]:
    """Return feeds in which the inputs `masks` show all keys by `shown`, 0 or 1, or hide the last third by the other.

    The first key is always shown.

    Random masks may hide all keys of a query, whose softmax is then undefined: of a causal model, that of the first.
    """
    found = dict(feeds)
    for name, value in feeds.items():
        if name in masks and value.ndim:
            mask = np.full(value.shape, shown, value.dtype)
            found[name] = place_at_end(mask, 1 - shown) if number % 2 else mask
    return found


@dataclass(frozen=True)
class _Chain:
    """The functions that run one after the other and replace one function of the source."""

    parts: tuple[tuple[Program, str], ...]
    mappings: tuple[InterfaceMapping, ...]
    rounded: tuple[Mapping[str, RoundedValue], ...]

    @property
    def label(self) -> str:
        return self.parts[0][1]


def _find_chains(parts: Sequence[ChangedPart]) -> Iterator[_Chain]:
    for name in parts[0].interfaces:
        present = [part for part in parts if name in part.interfaces]
        yield _Chain(tuple((part.program, name) for part in present), tuple(part.interfaces[name] for part in present),
                     tuple(part.rounded.get(name, {}) for part in present))


def _list_choices(
    function: Function, chain: _Chain, description: Any, seeds: int, steps: int
) -> list[list[ShapeChoice]]:
    """Return the input shapes to test, for each seed and step, with the shapes that changes fix.

    A function without states runs one step. Alternative shapes are tested in turn over seeds and steps; with one step,
    all of them are tested.
    """
    choices = list_shape_choices(function, description)
    steps = steps if _has_states(function) else 1
    fixed, turns = _find_fixed_shapes(function, chain)
    made = [ShapeChoice(choice.label, {**choice.shapes, **{
        name: shape for name, shape in fixed.items() if name in choice.shapes}}) for choice in choices]
    if not turns:
        return [[made[number % len(made)]] * steps for number in range(max(seeds, 1))]
    seeds = max(seeds, len(turns) if steps == 1 else 1)
    return [[ShapeChoice(made[0].label, {**made[0].shapes, **turns[(number * steps + step) % len(turns)]})
             for step in range(steps)] for number in range(seeds)]


def _has_states(function: Function) -> bool:
    return any(types.is_state(var.sym_type) for var in function.inputs.values())


def _find_fixed_shapes(
    function: Function, chain: _Chain
) -> tuple[dict[str, tuple[int, ...]], tuple[dict[str, tuple[int, ...]], ...]]:
    """Return the shapes that changes fix, and the shapes to test in turn, by the input names of the source."""
    fixed: dict[str, tuple[int, ...]] = {}
    turns: tuple[dict[str, tuple[int, ...]], ...] = ()
    for mapping in chain.mappings:
        names = {name: name for name in function.inputs}
        for step in mapping.steps:
            for change in step:
                if change.shape is not None and change.old is not None:
                    fixed[names.get(change.old, change.old)] = change.shape
                if change.shapes:
                    turns = tuple({names.get(name, name): shape for name, shape in each.items()}
                                  for each in change.shapes)
            renamed = {change.old: change.new for change in step if change.kind != "output"}
            names = {new: names[old] for old in names if (new := renamed.get(old, old)) is not None}
    return fixed, turns


def _run_steps(
    before: Program, chain: _Chain, choices: Sequence[ShapeChoice], seed: int, precision: str, description: Any,
    adjust: Adjust | None,
) -> Iterator[tuple[Run, Run]]:
    """Yield the runs of both sides, step by step; each side keeps its own states."""
    from ..runtime import Runtime

    name = chain.mappings[0].function
    function = before.functions[name]
    stateful, compared = _has_states(function), find_compared_values(function)
    state = make_state(function, seed)
    old = Runtime(before, function=name, precision=precision)
    new = [Runtime(program, function=each, precision=precision, constants={
               key: value.exact for key, value in rounded.items()})
           for (program, each), rounded in zip(chain.parts, chain.rounded, strict=True)]
    states: list[dict[str, Any]] = []
    carried: dict[str, Any] = {}
    for step, choice in enumerate(choices):
        number = seed + step * 101
        feeds = make_feeds(function, choice, number, description)
        if number % 2:
            feeds = oppose_feeds(function, choice, feeds, number, description)
        domains = infer_input_domains(function, get_symbol_sizes(function, choice.shapes)) if compared else {}
        for key, value in compared.items() if number % 2 else ():
            if domains[key][0] <= value <= domains[key][1]:
                feeds[key] = place_at_end(feeds[key], value)
        feeds = feeds if adjust is None else adjust(feeds, choice, number)
        for mapping in chain.mappings:
            feeds = mapping.round_feeds(feeds)
        if not states:
            states, carried = _start_states(chain, state, feeds)
        label = f"seed {seed}" + (f", step {step}" if stateful else "")
        plan = Plan(chain.label, label, feeds, dict(state))
        first, second = Run(plan), Run(plan)
        try:
            found = to_arrays(old(feeds, state))
        except InputError as error:
            first.error = second.error = str(error)
            yield first, second
            return
        for mapping in chain.mappings:
            found = {**found, **mapping.round_results(found, feeds)}
        found |= _label_states(state)
        try:
            made = _run_chain(new, chain, feeds, states, carried)
        except InputError as error:
            first.results[precision], second.error = found, str(error)
        else:
            gone = {change.old for mapping in chain.mappings for change in mapping.changes if change.new is None}
            kept = {key: value for key, value in found.items() if key in made or key not in gone}
            first.results[precision], second.results[precision] = kept, made
        yield first, second


def _start_states(
    chain: _Chain, state: Mapping[str, Any], feeds: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the first states of each part, and the first values of states that the caller carries for all parts."""
    states = [_select_values(part, mapping.map_state(state, feeds))
              for part, mapping in zip(chain.parts, chain.mappings)]
    carried: dict[str, Any] = {}
    for mapping in chain.mappings:
        carried |= mapping.start_carried(state, feeds)
    return states, carried


def _run_chain(
    runtimes: Sequence[Any], chain: _Chain, feeds: Mapping[str, Any], states: list[dict[str, Any]],
    carried: dict[str, Any],
) -> dict[str, Any]:
    """Run the parts one after the other; return the outputs and states of the source's function.

    States that the caller carries are fed to all parts that read them. After the last part they are updated with the
    results of the part whose outputs they are.
    """
    found: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    updated: dict[str, Any] = {}
    for runtime, part, mapping, state in zip(runtimes, chain.parts, chain.mappings, states):
        held = _select_values(part, mapping.feed_carried(carried))
        made = runtime({**_select_values(part, {**passed, **mapping.map_feeds(feeds)}), **held}, state)
        after = mapping.update_carried(carried, to_arrays(made), feeds)
        updated |= {name: value for name, value in after.items() if value is not carried[name]}
        passed |= to_arrays(made)
        # Tiles of one output may be made by several parts. Probabilities get their old name, with their labels.
        found |= to_arrays(mapping.unmap_results({**passed, **made}, feeds))
        found |= _label_states(mapping.unmap_state(state, feeds))
    carried |= updated
    for mapping in chain.mappings:
        found |= _label_states(mapping.unmap_carried(carried, feeds))
    return found


def _select_values(part: tuple[Program, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the `values` that are inputs or states of the function of a part."""
    program, name = part
    return {key: value for key, value in values.items() if key in program.functions[name].inputs}


def _label_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return states under the names of results, floats as float64: written states are float64, others have the fed
    dtype."""
    return {f"state {name}": value.astype(np.float64) if value.dtype.kind == "f" else value.copy()
            for name, value in state.items()}


def _merge_run(execution: Execution, run: Run, precision: str) -> None:
    """Add the results of a run at one precision to the existing run of the same feeds, or add the run."""
    same = [each for each in execution.runs if (each.plan.function, each.plan.label) == (
        run.plan.function, run.plan.label)]
    if not same:
        execution.runs.append(run)
    elif precision in run.results:
        same[0].results[precision] = run.results[precision]


def _describe_left_out(chain: _Chain) -> Iterator[str]:
    """Yield a note for each output and state that is not compared."""
    changes = [change for mapping in chain.mappings for change in mapping.changes if change.kind != "input"]
    made = {change.new for change in changes if change.action == "added"}
    compared = {tile for change in changes for tile in change.tiles}
    compared |= {each for change in changes if change.carried for each in (change.old, change.carried.output) if each}
    compared |= {change.new for change in changes if change.old and change.new}  # several states in one
    for action, why in (("removed", "was removed"), ("added", "is new")):
        for change in changes:
            name = change.old if action == "removed" else change.new
            elsewhere = len(chain.parts) > 1 or name in made and action == "removed"
            if change.action == action and not elsewhere and not change.tiles and name not in compared:
                yield f"{chain.label}: {change.kind} '{name}' {why}, so not compared"
