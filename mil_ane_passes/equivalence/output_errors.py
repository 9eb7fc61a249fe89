"""The error of a program's outputs as one number, which approximating rewrites use for their decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Program

from ..utils.errors import InputError
from .comparison import to_arrays
from .execution import Plan, copy_state

__all__ = ["compute_largest_error", "compute_outputs"]

Array = np.ndarray[Any, Any]
Results = dict[str, Array]


def compute_outputs(runtime: Any, plan: Plan) -> Results:
    """Return the outputs of a run, and the final values of the states, as arrays by name."""
    state = copy_state(plan)
    found = to_arrays(runtime(plan.feeds, state))
    return found | {f"state {name}": value for name, value in state.items()}


def compute_largest_error(program: Program, runs: Sequence[tuple[Plan, Results]], precision: str = "float16") -> float:
    """Return the largest error of `program`'s outputs over runs whose correct outputs are known.

    The error of an output is that of its worst element, as a fraction of the output's largest magnitude. For integers,
    such as the classes that an argmax selects, it is the fraction of changed elements. It is infinite if a finite
    number became infinite or NaN, if labels or shapes differ, or if the program cannot run.
    """
    from ..runtime import Runtime

    worst = 0.0
    for plan, right in runs:
        try:
            found = compute_outputs(Runtime(program, function=plan.function, precision=precision), plan)
        except InputError:
            return math.inf
        worst = max([worst, *(_compute_error(value, found.get(name)) for name, value in right.items())])
        if math.isinf(worst):
            break
    return worst


def _compute_error(right: Array, found: Array | None) -> float:
    if found is None or found.shape != right.shape or found.dtype.kind != right.dtype.kind:
        return math.inf
    if right.dtype.kind in "iub":
        return float(np.mean(found != right)) if right.size else 0.0
    if right.dtype.kind != "f":
        return 0.0 if np.array_equal(found, right) else math.inf
    known = np.isfinite(right)
    if not np.all(np.isfinite(found[known])):
        return math.inf
    scale = float(np.max(np.abs(right[known]), initial=0.0))
    gap = float(np.max(np.abs(found[known].astype(np.float64) - right[known]), initial=0.0))
    return 0.0 if gap == 0 else gap / scale if scale else math.inf
