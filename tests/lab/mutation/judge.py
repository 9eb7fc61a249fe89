"""A stronger judge than the equivalence check: is a planted error effective at all?

It compares a program with its rewritten form on many draws: other seeds, x 30, x 1000, x 1/1000, both zeros,
infinities, NaN, the ends of fp16, ties, constant rows, integers of both signs, and many sizes of flexible axes. A
difference counts where the rewrite without the error has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from mil_ane_passes.equivalence.comparison import Strictness, compare_outputs, fill_undefined
from mil_ane_passes.equivalence.feeds import make_state
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError

__all__ = ["find_effective_feeds"]

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Array]
_SIZES = (8, 1, 2, 3, 5, 7, 13, 40)
_SEED_COUNT = 8
_INTEGER_BOUNDS = (2, 3, 5, 8, 40)
"Integers are drawn from -n to n - 1; what is out of range raises an InputError, and is passed over."
_FP16_LIMITS = [65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5]
_DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "x 30": lambda random, shape: 30 * random.standard_normal(shape),
    "x 1000": lambda random, shape: 1000 * random.standard_normal(shape),
    "x 1/1000": lambda random, shape: random.standard_normal(shape) / 1000,
    "x 1e-6": lambda random, shape: random.standard_normal(shape) / 1e6,
    "whole numbers": lambda random, shape: np.round(2 * random.standard_normal(shape)),
    "large whole numbers": lambda random, shape: np.round(100 * random.standard_normal(shape)),
    "zeros": lambda random, shape: random.choice([0.0, -0.0], shape),
    "zeros and normals": lambda random, shape: random.choice([0.0, -0.0, 1.0, 0.5, -1.25], shape),
    "infinities": lambda random, shape: random.choice([np.inf, -np.inf, 1.0, 2.0], shape),
    "NaN": lambda random, shape: random.choice([np.nan, 1.0, 2.0, -3.0], shape),
    "ends of fp16": lambda random, shape: random.choice(_FP16_LIMITS, shape),
    "one number": lambda random, shape: np.full(shape, random.standard_normal()),
    "large and small": lambda random, shape: random.choice([3e4, -3e4, 1e-3, 0.1, -0.5], shape),
}


@dataclass(frozen=True)
class _RuntimeTrio:
    """A program, its rewritten form, and that with the error, each at both precisions."""

    before: dict[str, Runtime]
    limit: dict[str, Runtime]
    clean: dict[str, Runtime]
    mutated: dict[str, Runtime]
    promised: Strictness


def find_effective_feeds(
    before: Program, clean: Program, mutated: Program, promised: Strictness, within: float = np.inf
) -> str:
    """The draw at which the error changes results, or nothing: then it is equivalent as far as is known.

    `within` is the largest magnitude of inputs for which the program is what it means to be.
    """
    trio = _RuntimeTrio(
        _make_runtimes(before), _make_runtimes(before, True), _make_runtimes(clean), _make_runtimes(mutated), promised
    )
    function = before.functions["main"]
    for label, feeds in _iterate_feeds(function.inputs, within):
        state = make_state(function, 0)
        try:
            found = _find_difference(trio, feeds, state)
        except InputError:  # places outside of their axis, sizes that do not fit
            continue
        if found:
            return f"{label}, {found}"
    return ""


def _make_runtimes(program: Program, finite: bool = False) -> dict[str, Runtime]:
    return {precision: Runtime(program, precision=precision, finite_constants=finite)
            for precision in ("float64", "float16")}


def _run_precisions(runtimes: dict[str, Runtime], feeds: Feeds, state: Feeds) -> dict[str, dict[str, Array]]:
    return {precision: runtime(feeds, {name: value.copy() for name, value in state.items()})
            for precision, runtime in runtimes.items()}


def _find_difference(trio: _RuntimeTrio, feeds: Feeds, state: Feeds) -> str:
    """At which precision the mutated program is wrong where the clean one is right."""
    old, clean = _run_precisions(trio.before, feeds, state), _run_precisions(trio.clean, feeds, state)
    try:
        new = _run_precisions(trio.mutated, feeds, state)
    except InputError:
        return "it cannot be run"
    if trio.promised.fixes_nonfinite:
        old = fill_undefined(old, _run_precisions(trio.limit, feeds, state), clean)
    for precision in old:
        truth = None if precision == "float64" else old["float64"]
        right = compare_outputs(old[precision], clean[precision], trio.promised, truth)
        good = {each.output: each.passed for each in right}
        wrong = [each for each in compare_outputs(old[precision], new[precision], trio.promised, truth)
                 if good[each.output] and not each.passed]
        if wrong:
            return f"{precision}: {wrong[0]}"
    return ""


def _iterate_feeds(inputs: Mapping[str, Var], within: float) -> Iterator[tuple[str, dict[str, Array]]]:
    flexible = any(is_symbolic(extent) for var in inputs.values() for extent in var.shape)
    whole = any(not types.is_float(var.dtype) for var in inputs.values() if not types.is_state(var.sym_type))
    for size in _SIZES if flexible else _SIZES[:1]:
        for below in _INTEGER_BOUNDS if whole else _INTEGER_BOUNDS[:1]:
            for label, way in _DISTRIBUTIONS.items():
                for seed in range(100, 100 + (_SEED_COUNT if label == "normal" else 2)):
                    random = np.random.default_rng(seed)
                    yield f"{label}, seed {seed}, size {size}, integers below {below}", {
                        name: _sample_input(random, var, size, below, way, within) for name, var in inputs.items()
                        if not types.is_state(var.sym_type)}


def _sample_input(random: np.random.Generator, var: Var, size: int, below: int, way: Any, within: float) -> Array:
    shape = tuple(size if is_symbolic(extent) else int(extent) for extent in var.shape)
    dtype = types.nptype_from_builtin(var.dtype)
    if types.is_float(var.dtype):
        with np.errstate(over="ignore"):
            return np.asarray(way(random, shape)).clip(-within, within).astype(dtype)
    if var.dtype == types.bool:
        return random.random(shape) < 0.5
    return random.integers(-below, below, shape).astype(dtype)
