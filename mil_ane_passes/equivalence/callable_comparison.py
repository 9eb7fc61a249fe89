"""Comparison of a program with the torch module or callable from which it was converted.

Outputs are judged by a tolerance, because the conversion rounded or compressed the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Program, types

from ..ir.query import get_static_shape, iterate_ops
from ..passes.contract import Exactness
from ..utils.errors import InputError
from .callables import Caller, Noise, RejectedSizes
from .comparison import Accuracy, OutputDifference, describe_worst_element, to_arrays
from .coverage import find_outputs_without_numbers
from .equivalence import Case, VerifyReport
from .execution import (
    Plan,
    Run,
    build_plans,
    build_shaped_plan,
    check_runnable,
    describe_unusable_feeds,
    execute_plans,
)
from .feeds import find_image_inputs
from .undetermined_elements import (
    FP16_ROUNDING,
    FP32_ROUNDING,
    Rounding,
    describe_cancelled,
    describe_undetermined,
    find_cancelled,
    find_undetermined,
    move_numbers,
    replace_elements,
)

__all__ = [
    "FP16_TOLERANCE",
    "FP32_TOLERANCE",
    "build_example_plans",
    "compare_with_callable",
    "compare_within_tolerance",
    "get_default_tolerance",
]

Array = np.ndarray[Any, Any]

FP32_TOLERANCE = 1e-4
"Tolerance for a program entirely in fp32, as a fraction of an output's largest value: sums in another order differ."
FP16_TOLERANCE = 2e-2
"The same for a program with fp16 or compressed values: fp16 rounds by up to 2**-11, and errors add up over the layers."
_ROUNDING_FACTOR = 2
"""How much further than torch's own float32 a program may be from torch at float64, up to the tolerance for fp16: its
constants were computed and rounded at float32 in another order."""


def get_default_tolerance(program: Program) -> float:
    """Return `FP16_TOLERANCE` if any value of the program is fp16 or compressed, else `FP32_TOLERANCE`."""
    reduced = any(
        op.op_type.startswith("constexpr_") or any(
            not types.is_list(var.sym_type) and getattr(var, "dtype", None) == types.fp16 for var in op.outputs)
        for _, op in iterate_ops(program))
    return FP16_TOLERANCE if reduced else FP32_TOLERANCE


def compare_with_callable(
    program: Program, given: Any, *, program_first: bool, seeds: int, precision: str, tolerance: float | None = None,
    feeds: Mapping[str, Array] | None = None, describe: Callable[[str], Any] = lambda name: None,
    quirks: Sequence[str] = (), accuracy: Accuracy | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Compare the outputs of a program's default function with a callable's, on the program's inputs.

    `given` is as in `Caller`. An output passes if each element differs by at most `tolerance` times the largest value
    of the first side's output. Integers, bools and strings must be equal, and non-finite elements must be the same.
    Elements that rounding decides are not compared, and those that are zero up to rounding are compared within that of
    the numbers that cancel, see `undetermined_elements`. An output of a program at float32 that differs is compared
    with the module's at float64, within the rounding of its float32, if that exceeds the tolerance. Limits in
    `accuracy` replace the tolerance; then all elements are compared. Raises InputError if the callable cannot be used,
    raises an exception, or returns another number of outputs.
    """
    check_runnable(program, quirks)
    name = program.default_function_name
    function = program.functions[name]
    states = [each for each, var in function.inputs.items() if types.is_state(var.sym_type)]
    fed = [each for each in function.inputs if each not in states]
    labels = any(var.op is not None and var.op.op_type == "classify" for var in function.outputs)
    caller = Caller(given, fed, [var.name for var in function.outputs], labels=labels)
    followed = caller.states(states)
    share = get_default_tolerance(program) if tolerance is None else tolerance
    rounding = FP16_ROUNDING if get_default_tolerance(program) == FP16_TOLERANCE else FP32_ROUNDING
    report = VerifyReport("equal", Exactness.ROUNDING, quirks=tuple(quirks), accuracy=accuracy,
                          tolerance=None if accuracy else share)
    report.notes += _describe_left_out(program, name, states, followed)
    # A query whose keys are all hidden has equal weights where the mask is the lowest float32, which absorbs the
    # scores, and those of its scores, or NaN, where the mask is a number of fp16 or an infinity.
    hides_rows = rounding is not FP16_ROUNDING
    plans = [plan for plan in build_plans(program, seeds, describe, feeds, hides_rows) if plan.function == name]
    if feeds is None:
        plans += build_example_plans(program, name, caller.list_example_shapes(), describe)
    made = [caller.fit_plan(_zero_other_states(plan, followed)) for plan in plans]
    runs = execute_plans(program, made, (precision,), lambda text: progress(f"program, {text}"), quirks).runs
    for number, run in enumerate(runs, 1):
        if run.error:
            report.notes.append(f"{name}, {run.plan.label}: not compared, as the program cannot be run ({run.error})")
            continue
        progress(f"{caller.name}, run {number} of {len(runs)}")
        try:
            case, undetermined = _compare_run(run, caller, precision, program_first, accuracy or share, rounding)
            report.cases.append(case)
            report.notes += undetermined
        except RejectedSizes as error:
            if run.plan.asked:
                raise
            report.notes.append(f"{name}, {run.plan.label}: not compared, as its sizes are rejected ({error})")
    if not report.cases:
        report.status, report.reason = "not verified", describe_unusable_feeds(report.notes[-1])
    elif not all(case.passed for case in report.cases):
        report.status = "different"
        report.notes += [
            f"input '{image}' is an image: {caller.name} was called with pixels from 0 to 255, without the scale and "
            "bias that the model may apply" for image in sorted(find_image_inputs(describe(name)))]
    report.leave_open("", find_outputs_without_numbers(program, (run for run in runs if not run.error)))
    return report


def build_example_plans(
    program: Program, name: str, shapes: Sequence[tuple[int, ...]] | None, describe: Callable[[str], Any]
) -> list[Plan]:
    """Make a run with the shapes of an exported module's example, if the function has flexible inputs."""
    function = program.functions[name]
    flexible = any(get_static_shape(var) is None for var in function.inputs.values())
    return [build_shaped_plan(program, name, shapes, describe, "the export's")] if shapes and flexible else []


def _describe_left_out(program: Program, name: str, states: Sequence[str], followed: Sequence[str]) -> list[str]:
    notes = [f"function '{other}' was not compared: a callable stands for one, '{name}'"
             for other in program.functions if other != name]
    return notes + [f"state '{state}' started as zeros, and its final value was not compared: the callable has no "
                    "buffer of that name" for state in states if state not in followed]


def _zero_other_states(plan: Plan, followed: Sequence[str]) -> Plan:
    """Return the plan with zeros in the states that the callable does not have."""
    kept = {name: value for name, value in plan.state.items() if name in followed}
    zeros = {name: np.zeros_like(value) for name, value in plan.state.items() if name not in followed}
    return replace(plan, state=kept | zeros)


def _compare_run(
    run: Run, caller: Caller, precision: str, program_first: bool, limit: Accuracy | float, rounding: Rounding
) -> tuple[Case, list[str]]:
    """Compare a run's outputs with the callable's; also return descriptions of the elements that rounding decides."""
    plan = run.plan

    def call(
        move: Callable[[Array], Array] | None = None, noise: Noise | None = None, at_float64: bool = False
    ) -> dict[str, Array]:
        state = {name: plan.state[name].copy() for name in caller.states(list(plan.state))}
        returned = caller(plan.feeds, state, move, noise, at_float64=at_float64)
        return to_arrays(returned) | {f"state {name}": value for name, value in state.items()}

    def judge(expected: Mapping[str, Array], limits: Mapping[str, float]) -> list[OutputDifference]:
        found = []
        for name, value in mine.items():
            first, second = (value, expected[name]) if program_first else (expected[name], value)
            found.append(limit.judge(name, first, second) if isinstance(limit, Accuracy) else
                         compare_within_tolerance(name, first, second, limits.get(name, limit)))
        return found

    other = call()
    mine = {name: value for name, value in run.results[precision].items() if name in other}
    judged = judge(other, {})
    if all(each.passed for each in judged) or isinstance(limit, Accuracy) or any(each.reason for each in judged):
        return Case(plan.function, plan.label, precision, judged), []
    names, notes = {each.output for each in judged if not each.passed}, []
    limits: dict[str, float] = {}
    if rounding is FP32_ROUNDING:
        exact = _compute_at_float64(other, call)
        own = {name: _measure_rounding(other[name], exact[name]) for name in names}
        limits = {name: max(limit, min(_ROUNDING_FACTOR * share, FP16_TOLERANCE)) for name, share in own.items()}
        names = {each.output for each in judge(exact, limits) if not each.passed} & names
        limits = {name: share for name, share in limits.items() if name not in names}
        other |= {name: exact[name] for name in limits}
        notes += [f"{name} was compared with torch at float64, within {share:.1e} of the largest value, at "
                  f"{plan.label}: torch's float32 is off by {own[name]:.1e} of it" for name, share in limits.items()]
    cancelled = find_cancelled(other, mine, lambda error, seed: call(noise=(error, seed)), names, rounding, limit)
    other |= {name: replace_elements(other[name], mine[name], elements) for name, elements in cancelled.items()}
    judged, notes = judge(other, limits), [*notes, *describe_cancelled(cancelled, plan.label)]
    names = {each.output for each in judged if not each.passed}
    if not names:
        return Case(plan.function, plan.label, precision, judged), notes
    expected = {name: np.atleast_1d(other[name]) for name in mine}
    found = {name: np.atleast_1d(value) for name, value in mine.items()}

    def run_moved(seed: int, units: int, unit: float) -> dict[str, Array]:
        random = np.random.default_rng(seed)
        moved = call(lambda value: move_numbers(value, units, unit, random))
        return {name: np.atleast_1d(moved[name]) for name in mine}

    undetermined = find_undetermined(expected, found, expected, run_moved, names, rounding, limit)
    undetermined = {name: elements.reshape(other[name].shape) for name, elements in undetermined.items()}
    again = judge({name: replace_elements(value, mine[name], undetermined.get(name))
                   for name, value in other.items() if name in mine}, limits)
    if not names <= undetermined.keys() or not all(each.passed for each in again):
        return Case(plan.function, plan.label, precision, judged), []
    return (Case(plan.function, plan.label, precision, again),
            [*notes, *describe_undetermined(undetermined, names, plan.label, rounding)])


def _compute_at_float64(expected: Mapping[str, Array], call: Callable[..., Mapping[str, Array]]) -> dict[str, Array]:
    """Return the expected outputs with the floats that the callable computes at float64.

    Those that are not finite at both precisions stay, and all of them if the callable cannot be run at float64.
    """
    try:
        exact = call(at_float64=True)
    except InputError:
        return dict(expected)
    with np.errstate(invalid="ignore"):
        return {name: np.where(np.isfinite(value) & np.isfinite(exact[name]), exact[name], value)
                if value.dtype.kind == exact[name].dtype.kind == "f" and value.shape == exact[name].shape else value
                for name, value in expected.items()}


def _measure_rounding(rounded: Array, exact: Array) -> float:
    """Measure the largest difference of finite elements as a fraction of the largest one; 0 if there are none."""
    if rounded.dtype.kind != "f":
        return 0.0
    finite = np.isfinite(rounded) & np.isfinite(exact)
    with np.errstate(invalid="ignore"):  # infinities in both
        largest = float(np.max(np.abs(exact), initial=0.0, where=finite))
        return float(np.max(np.abs(exact - rounded), initial=0.0, where=finite)) / largest if largest else 0.0


def compare_within_tolerance(name: str, old: Array, new: Array, tolerance: float) -> OutputDifference:
    """Judge one output against the tolerance.

    A scalar is compared as an array of one element, because the converter turns it into one.
    """
    old, new = np.atleast_1d(old), np.atleast_1d(new)
    if old.shape != new.shape:
        return OutputDifference(name, False, False, reason=f"has shape {list(old.shape)} in the first and "
                                                           f"{list(new.shape)} in the second")
    kinds = {old.dtype.kind, new.dtype.kind}
    if kinds & set("US") or not kinds & set("f"):
        if np.array_equal(old, new):
            return OutputDifference(name, old.dtype == new.dtype, True)
        if kinds & set("US"):
            return OutputDifference(name, False, False, reason=f"was {old.tolist()!r} and is {new.tolist()!r}")
    return _compare_arrays(name, old, new, tolerance if kinds == {"f"} else 0.0)


def _compare_arrays(name: str, old: Array, new: Array, tolerance: float) -> OutputDifference:
    coarse = min((each.dtype for each in (old, new) if each.dtype.kind == "f"), key=lambda dtype: dtype.itemsize,
                 default=old.dtype)
    first, second = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(first)
    allowed = np.full(old.shape, tolerance * float(np.max(np.abs(first[finite]), initial=0.0)))
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):
        good = same | (np.abs(second - first) <= allowed) & finite
    if old.dtype == new.dtype and bool(np.all(same & (np.signbit(first) == np.signbit(second)))):
        return OutputDifference(name, True, True)
    return describe_worst_element(name, old, new, allowed, bool(np.all(good)), unit_of=coarse)
