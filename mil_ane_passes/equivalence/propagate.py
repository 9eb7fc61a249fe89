"""Propagation of rewrites' declared changes of single ops to downstream ops, by running the changed program.

A rewrite that fires may declare, for one op, a change of constants or the largest movement of a result. A downstream
product may amplify it, a remainder may wrap it around, and it may be visible in a small output. If results differ, the
program before is therefore run again with its ops changed as declared, and the resulting change of its outputs is
allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Program, Var

from ..ir.query import iterate_nested_ops
from ..passes.pass_trace import Change
from ..runtime.departure import LAST_FULL_TRIAL, TRIALS, Departure
from .comparison import OutputDifference
from .execution import Run, copy_state, execute_plans
from .value_matching import FunctionValues, find_ancestors

__all__ = ["MOVED", "NOT_JUDGED", "RAISED", "ROUNDED", "made_of_nan", "made_of_roundings", "make_departures",
           "measure_moves"]

Array = np.ndarray[Any, Any]
RAISED = ("results that depend on a constant too small for fp16, such as an epsilon, are compared with the same "
          "program with 2^-24 in its place")
MOVED = ("a change that a rewrite declares for one op was propagated by running: results may move twice as far as in "
         "the same program with that op changed")
ROUNDED = ("the rounding of a replaced op was propagated by running: at float16, results may move twice as far as in "
           "the same program with that op's result changed by one unit in the last place")
NOT_JUDGED = "not judged at float16 on extreme values, as it is computed from ops whose rewrites only round"
STATE = "state "


def make_departures(
    program: Program, changes: Sequence[Change], trial: int | None = None, stored: bool = False
) -> Callable[[str], Departure | None]:
    """Return a function that makes the departure for a function of `program`, at the ops that `changes` lists.

    The departure is None if there are no such ops.
    """
    def make_departure(function: str) -> Departure | None:
        found = _find_changed_ops(program, function, changes)
        return Departure(found, trial, stored) if found else None

    return make_departure


def _find_changed_ops(program: Program, function: str, changes: Sequence[Change]) -> dict[Operation, Change]:
    known = {(change.op_type, change.value): change for change in changes if change.function == function}
    places = ((op, known.get((str(op.op_type), op.outputs[0].name)))
              for op in iterate_nested_ops(program.functions[function]) if op.outputs)
    return {op: change for op, change in places if change is not None}


def measure_moves(
    program: Program, run: Run, changes: Sequence[Change], find_failures: Callable[[], Sequence[OutputDifference]]
) -> Iterator[str]:
    """Measure how far each element of the outputs of `run` moves at float64 if results of ops move as declared.

    `run.moved` grows with each trial. As a trial is a run of the whole program, the trials end when `find_failures`
    returns nothing, or an infinite difference that no trial can explain. If the run still fails, `run.moved_stored` is
    measured in the same way, with results that move at least by their rounding to the stored dtypes. Yields the notes
    to add to the report: one for each of the two in which any element moves.
    """
    base: dict[str, Array] | None = None
    for stored, note in ((False, MOVED), (True, ROUNDED)):
        moving = [change for change in changes if change.moves or (change.reach < math.inf and not stored)]
        if not _find_changed_ops(program, run.plan.function, moving):
            continue
        base = _run_moved(program, run, changes, None, stored) if base is None else base
        moved = {name: np.zeros(value.shape) for name, value in base.items() if value.dtype.kind in "fiub"}
        if stored:
            run.moved_stored = moved
        else:
            run.moved = moved
        for trial in range(TRIALS):
            outputs = _run_moved(program, run, changes, trial, stored)
            for name, most in moved.items():
                np.maximum(most, _compute_distance(base[name], outputs.get(name)), out=most)
            failures = find_failures()
            if not failures or (trial >= LAST_FULL_TRIAL and any(_is_unexplained(each, moved) for each in failures)):
                break
        if any(np.any(gap) for gap in moved.values()):
            yield note
        if not find_failures():
            return


def _is_unexplained(failure: OutputDifference, moved: Mapping[str, Array]) -> bool:
    """Return whether a number became NaN or infinite in an output of which no element did so in a trial."""
    return math.isinf(failure.absolute) and bool(np.all(np.isfinite(moved.get(failure.output, np.zeros(())))))


def _run_moved(
    program: Program, run: Run, changes: Sequence[Change], trial: int | None, stored: bool
) -> dict[str, Array]:
    """Return the outputs of `run` at float64 with ops changed as declared; none if it ends in an error.

    Without `trial`, no result moves, and `stored` has no effect.
    """
    depart = make_departures(program, changes, trial, stored)
    again = execute_plans(program, [run.plan], ("float64",), lambda text: None, depart=depart)
    return again.runs[0].results.get("float64", {})


def made_of_roundings(program: Program, run: Run, changes: Sequence[Change]) -> frozenset[str]:
    """Return the outputs and states that are computed from ops whose rewrites only round.

    At float16, extreme values cannot test these outputs, because partial results of the rewrite, which the original op
    does not have, may overflow.
    """
    function = run.plan.function
    rounding = _find_changed_ops(program, function, [change for change in changes if change.rounds])
    return _made_of(program, run, {var for op in rounding for var in op.outputs})


def made_of_nan(program: Program, run: Run) -> frozenset[str]:
    """Return the outputs and states that are computed from values that are NaN in `run`, at any of its precisions."""
    from ..runtime import Runtime

    found: set[Var] = set()

    def record_nan(op: Operation, var: Var, value: Any) -> None:
        if hasattr(value, "numpy") and value.is_floating_point() and bool(value.isnan().any()):
            found.add(var)

    for precision in run.results:
        Runtime(program, function=run.plan.function, precision=precision, observer=record_nan)(
            run.plan.feeds, copy_state(run.plan))
    return _made_of(program, run, found)


def _made_of(program: Program, run: Run, found: set[Var]) -> frozenset[str]:
    """Return the outputs and states of `run` that depend on one of the values `found`."""
    function = run.plan.function
    values = FunctionValues(function, program.functions[function])

    def split_name(name: str) -> tuple[list[str], list[str]]:
        state = name.removeprefix(STATE)
        return ([], [state]) if state != name else ([name.removesuffix(" labels")], [])

    outputs = run.results.get("float64", {}) if found else {}
    return frozenset(name for name in outputs if found & find_ancestors(values, *split_name(name)))


def _compute_distance(value: Array, other: Array | None) -> Array:
    """Return the distance of each element of two results; infinite if a finite number became NaN or infinite."""
    if other is None or other.shape != value.shape:
        return np.zeros(value.shape)
    one, two = value.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(two - one)
    return np.where(np.isfinite(one), np.where(np.isfinite(two), gap, np.inf), 0.0)
