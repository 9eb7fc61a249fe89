"""Measurement of the ranges of a program's values in runs with the user's feeds; rules use them for decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Program, Var

from ..ir.value_ranges import Measure, MeasuredRanges, Range
from ..utils.errors import InputError, MemoryLimitReached, NotSupported
from .execution import Plan
from .output_errors import Results, compute_largest_error, compute_outputs

__all__ = ["make_measurer", "measure_ranges"]

Progress = Callable[[str], None]


def measure_ranges(program: Program, made: Sequence[Plan], progress: Progress = lambda text: None) -> MeasuredRanges:
    """Measure the range of every numeric value, including inputs, over the runs `made` at float32.

    The result can also compute the error of another program's outputs in these runs. Sampled feeds that the program
    cannot run (their size is unsupported, or the run exceeds the memory limit) are omitted. Raises InputError or
    MemoryLimitReached if no feeds remain, or if such feeds are user-supplied, and NotSupported for an op that the
    runtime does not support.
    """
    found: dict[Var, Range] = {}
    runs: list[tuple[Plan, Results]] = []
    for number, plan in enumerate(made, 1):
        progress(f"measuring run {number} of {len(made)}: {plan.function}, {plan.label}")
        try:
            seen, right = _measure_run(program, plan)
        except (InputError, NotSupported) as error:
            is_skipped = isinstance(error, (InputError, MemoryLimitReached)) and not plan.asked
            if not is_skipped or (number == len(made) and not runs):
                raise
            progress(f"run {number} is omitted: {error}")
            continue
        found |= {var: _join_ranges(found.get(var), each) for var, each in seen.items()}
        runs.append((plan, right))
    return MeasuredRanges(found, lambda after: compute_largest_error(after, runs), [plan for plan, _ in runs])


def _measure_run(program: Program, plan: Plan) -> tuple[dict[Var, Range], Results]:
    """Measure the ranges of one run; return them and the run's outputs."""
    from ..runtime import Runtime

    found: dict[Var, Range] = {}
    sums: dict[Operation, float] = {}

    def record_sum(op: Operation, bound: float) -> None:
        sums[op] = max(sums.get(op, 0.0), bound)

    def record_value(op: Operation, var: Var, value: Any) -> None:
        if hasattr(value, "numpy"):
            found[var] = _join_ranges(found.get(var), _compute_range(value.numpy(), sums.get(op)))

    runtime = Runtime(program, function=plan.function, precision="float32", observer=record_value,
                      partial_sums=record_sum)
    for name, var in program.functions[plan.function].inputs.items():
        if name in plan.feeds:
            found[var] = _compute_range(np.asarray(plan.feeds[name]), None)
    return found, compute_outputs(runtime, plan)


def make_measurer(make: Callable[[Program], Sequence[Plan]], progress: Progress = lambda text: None) -> Measure:
    """Make a `Measure` that runs the plans that `make` returns for a program."""
    return lambda program: measure_ranges(program, make(program), progress)


def _compute_range(array: np.ndarray[Any, Any], partial: float | None) -> Range:
    if array.dtype.kind not in "fiu":
        return Range(partial=partial)
    finite = array[np.isfinite(array)]
    sizes = np.abs(finite[finite != 0])
    ends = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return Range(*ends, float(sizes.min()) if sizes.size else 0.0, finite.size == array.size, partial)


def _join_ranges(one: Range | None, other: Range) -> Range:
    if one is None:
        return other
    smallest = [each.smallest for each in (one, other) if each.smallest]
    sums = [each.partial for each in (one, other) if each.partial is not None]
    return Range(min(one.low, other.low), max(one.high, other.high), min(smallest, default=0.0),
                 one.finite and other.finite, max(sums, default=None))
