"""Elements of outputs that rounding decides: they leave the tolerance where rounded numbers move in their last bits.

Such is the angle of a negative number whose imaginary part is the rounding of a sum, pi or -pi, and, at fp16, the class
of a pixel for which two scores are almost equal. A comparison with what a program was converted from leaves them out.

Elements that are zero up to rounding, such as the variance of copies of a number, are compared with what rounding makes
of the numbers that cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..utils.errors import InputError
from .trace import MIN_FP16_OVERFLOW

__all__ = ["FP16_ROUNDING", "FP32_ROUNDING", "Rounding", "describe_cancelled", "describe_undetermined",
           "find_cancelled", "find_undetermined", "move_numbers", "replace_elements"]

Array = np.ndarray[Any, Any]

_MOVED_RUNS_IN_VAIN = 12
"Runs after which an output of which no differing element has moved is wrong."
_MEASURED_FACTOR = 8
"How much larger than the move of an element its difference may be, of an output with many such elements."
_FEW_ELEMENTS = 16
"The most elements of which a share says little."
_OWN_RUNS, _NOISY_RUNS = 8, 32
"""Runs with noise at float32, to find out which elements are zero up to rounding, and most runs at the precision of
what is compared, to find out how far these may differ."""
_ORDINARY_RUNS, _ORDINARY_NOISE = 4, 0.25
"Runs in which the numbers that cancel differ, to find out how large an element is then, and by which fraction."
_MAX_CANCELLED = 2e-2
"The largest difference of an element that is zero up to rounding, as a fraction of its output where nothing cancels."


@dataclass(frozen=True)
class Rounding:
    """How far numbers are moved to find the elements of outputs that rounding to a dtype decides."""

    unit: float
    "The smallest move, as a fraction of the power of two below the number."
    noise: float
    "The error of the numbers that each op reads, as a fraction of them, in runs that measure the rounding of zeros."
    most: tuple[int, ...]
    "The most units by which a number is moved, by run."
    max_share: float
    "The largest share of an output's elements that may be left out of the comparison."
    max_unmeasured_share: float
    "The largest share of which any difference is accepted; of a larger one, those of about the size of the moves."
    max_proportional_share: float
    "The largest share of the moving elements that may move half as far where the numbers do: these are errors."
    example: str


FP32_ROUNDING = Rounding(2.0**-23, 2.0**-21, (4, 4, 4, 4, 16, 16, 16, 16, *[64] * 24), 0.9, 0.1, 1.0,
                         "the angle of a number whose imaginary part, or both parts, are the rounding of a sum")
"""64 units are a tenth of the tolerance at fp32. Most bins of the spectrum of a tone are rounding. The noise is that of
eight roundings: sums of many numbers, and programs that compute in another order, round more often than once per op."""
FP16_ROUNDING = Rounding(2.0**-11, 2.0**-11, (1, 1, 1, 1, 2, 2, 2, 2, *[4] * 24), 0.5, 0.5, 0.25,
                         "the larger one of two numbers that are equal at fp16")
"""Four units are a tenth of the tolerance at fp16. The noise is that of one rounding, of weights and constants:
programs with fp16 are compared as they compute at float32 or float64."""


def find_undetermined(
    expected: Mapping[str, Array], found: Mapping[str, Array], start: Mapping[str, Array],
    run_moved: Callable[[int, int, float], Mapping[str, Array]], names: Collection[str], rounding: Rounding,
    tolerance: float, kinds: str = "fiub",
) -> dict[str, Array]:
    """Find the elements that move, by output, until those of `names` that differ from the expected ones have.

    `run_moved(seed, units, unit)` runs what gave `start` with its rounded numbers moved by at most so many units.
    Outputs of dtypes other than `kinds` are left alone, and all of them if a run with moved numbers fails, as with an
    index that is computed from them. The result does not have outputs that move in proportion to the numbers, as those
    do whose errors grow with the layers: a choice between two elements changes or does not. Nor does it have those with
    many elements that move, if the differences of these are larger than what they move by. Of few integers, such as
    counts of the pixels of a class, any share may differ if a moved run gives each of those found, or of those
    expected where it starts from what was found.
    """
    shared = [name for name, value in expected.items() if value.size and value.dtype.kind in kinds and (
        start[name].dtype.kind in kinds) and value.shape == start[name].shape == found[name].shape]
    wanted = {name: expected[name].astype(np.float64) for name in shared}
    changed = {name: np.zeros(value.shape, bool) for name, value in wanted.items()}
    allowed = {name: tolerance * np.max(np.abs(value), initial=0.0, where=np.isfinite(value))
               if expected[name].dtype.kind == "f" else 0.0 for name, value in wanted.items()}
    with np.errstate(invalid="ignore"):  # infinities in both
        differing = {name: np.abs(found[name] - value) > allowed[name] for name, value in wanted.items()
                     if name in names}
        given = {name: np.zeros(elements.shape, bool) for name, elements in differing.items()
                 if elements.size <= _FEW_ELEMENTS and expected[name].dtype.kind != "f"}
        other = {name: np.where(start[name] == found[name], expected[name], found[name]) for name in given}
        if any(np.mean(elements) > rounding.max_share for name, elements in differing.items() if name not in given):
            return {}
        counts = {name: np.zeros(2) for name in shared}
        largest = {name: np.zeros(value.shape) for name, value in wanted.items()}
        for number, units in enumerate(rounding.most, start=1):
            try:
                moved = [run_moved(number, units, unit) for unit in (rounding.unit, rounding.unit / 2)]
            except InputError:
                return {}
            whole, half = ({name: np.abs(value[name] - start[name].astype(np.float64)) for name in shared
                            if value[name].shape == changed[name].shape} for value in moved)
            for name in whole.keys() & half.keys():
                moving = whole[name] > allowed[name]
                changed[name] |= moving
                largest[name] = np.fmax(largest[name], whole[name])
                is_proportional = np.abs(half[name][moving] / whole[name][moving] - 0.5) < 0.25
                counts[name] += np.count_nonzero(is_proportional), np.count_nonzero(moving)
            for name, value in ((name, value[name]) for value in moved for name in given):
                if value.shape == given[name].shape:
                    given[name] |= value == other[name]
            left = {name: elements for name, elements in differing.items()
                    if np.any(elements & ~given.get(name, changed[name]))}
            if not left or number == _MOVED_RUNS_IN_VAIN and not all(
                    np.any(elements & changed[name]) for name, elements in left.items()):
                break
        measured = {name: not np.any(elements & (np.abs(found[name] - wanted[name]) > _MEASURED_FACTOR * largest[name]))
                    for name, elements in differing.items()}
    return {name: elements for name, elements in changed.items()
            if name not in given and np.mean(elements) <= rounding.max_share
            and (np.mean(elements) <= rounding.max_unmeasured_share or measured.get(name, False))
            and counts[name][0] <= rounding.max_proportional_share * counts[name][1]} | {
                name: differing[name] for name in given if not np.any(differing[name] & ~given[name])}


def find_cancelled(
    expected: Mapping[str, Array], found: Mapping[str, Array],
    run_with_noise: Callable[[float, int], Mapping[str, Array]], names: Collection[str], rounding: Rounding,
    tolerance: float,
) -> dict[str, Array]:
    """Find the elements of `names` that are zero up to rounding, and for which `found` is as close to it, by output.

    The noise of an element is how far it moves in runs in which each op reads numbers that are off by a few roundings.
    An element that is not larger than its noise at float32, in which torch computes, is zero up to rounding: the
    variance of equal numbers, and a norm of them, whose small divisor enlarges their rounding. It may differ by its
    noise at `rounding`, but not by more than a small fraction of the size of the output where the numbers differ, so
    that a result that is all noise, as the sine of large numbers, is not excused. A small difference of large numbers
    is not zero, though it may be as small as their rounding to fp16.
    `run_with_noise(error, seed)` runs what gave `expected` with floats that are off by this fraction. The result has no
    elements if such a run fails, as with an index that is computed from them.
    """
    wanted = {name: expected[name].astype(np.float64) for name in names if name in expected and (
        expected[name].dtype.kind == found[name].dtype.kind == "f" and expected[name].shape == found[name].shape)}
    with np.errstate(invalid="ignore"):  # infinities in both
        gaps = {name: np.abs(found[name] - value) for name, value in wanted.items()}
        differing = {name: gaps[name] > tolerance * np.max(np.abs(value), initial=0.0, where=np.isfinite(value))
                     for name, value in wanted.items()}
    if not any(map(np.any, differing.values())):
        return {}

    def run_and_compare(error: float, seed: int) -> Iterator[tuple[str, Array, Array]]:
        """Yield the name, value and move of each output that keeps its shape, NaN where it is not finite."""
        for name, value in run_with_noise(error, seed).items():
            if name in wanted and value.shape == wanted[name].shape:
                finite = np.where(np.isfinite(value), value, np.nan).astype(np.float64)
                yield name, finite, np.abs(finite - wanted[name])

    sizes = dict.fromkeys(wanted, 0.0)
    own_noise, noise = ({name: np.zeros(value.shape) for name, value in wanted.items()} for _ in range(2))
    cancelled: dict[str, Array] = {}
    try:
        for seed in range(_ORDINARY_RUNS):
            for name, value, _ in run_and_compare(_ORDINARY_NOISE, seed):
                sizes[name] = max(sizes[name], float(np.max(np.abs(value), initial=0.0, where=~np.isnan(value))))
        for seed in range(_ORDINARY_RUNS, _ORDINARY_RUNS + _OWN_RUNS):
            for name, _, move in run_and_compare(FP32_ROUNDING.noise, seed):
                own_noise[name] = np.fmax(own_noise[name], move)
        is_zero = {name: np.abs(value) <= own_noise[name] for name, value in wanted.items()}
        if not any(np.any(elements & is_zero[name]) for name, elements in differing.items()):
            return {}
        for seed in range(_ORDINARY_RUNS + _OWN_RUNS, _ORDINARY_RUNS + _OWN_RUNS + _NOISY_RUNS):
            for name, _, move in run_and_compare(rounding.noise, seed):
                noise[name] = np.fmax(noise[name], move)
            cancelled = {name: zeros & (gaps[name] <= np.minimum(noise[name], _MAX_CANCELLED * sizes[name]))
                         for name, zeros in is_zero.items()}
            if not any(np.any(elements & ~cancelled[name]) for name, elements in differing.items()):
                break
    except InputError:
        return {}
    return {name: elements for name, elements in cancelled.items() if np.any(elements & differing[name])}


def replace_elements(expected: Array, found: Array, chosen: Array | None) -> Array:
    """Return the expected values with those found where `chosen` is true, in the dtype by which they are compared."""
    if chosen is None:
        return expected
    with np.errstate(invalid="ignore"):  # a NaN as an integer, which differs from it
        return np.where(chosen, found, expected).astype(expected.dtype)


def describe_undetermined(
    undetermined: Mapping[str, Array], names: Collection[str], place: str, rounding: Rounding
) -> Iterator[str]:
    """Describe the elements of the outputs in `names` that were not compared at `place`, one text for each output."""
    for name in sorted(names):
        elements = undetermined[name]
        yield (f"{np.count_nonzero(elements)} of {elements.size} elements of {name} were not compared at {place}: they "
               f"are decided by rounding, as {rounding.example}")


def describe_cancelled(cancelled: Mapping[str, Array], place: str) -> Iterator[str]:
    """Describe the elements of outputs that are zero up to rounding at `place`, one text for each output."""
    for name, elements in sorted(cancelled.items()):
        yield (f"{np.count_nonzero(elements)} of {elements.size} elements of {name} are zero up to rounding at "
               f"{place}: they are decided by rounding, as the variance of equal numbers, and were compared within "
               "that of the numbers that cancel")


def move_numbers(value: Array, units: int, unit: float, random: np.random.Generator) -> Array:
    """Return `value` with floats that fp16 cannot hold, which are rounded ones, moved by at most so many units.

    A unit is a fraction of the power of two below the number, so that a number that fp16 rounds to 0 stays what it is.
    """
    if value.dtype.kind != "f":
        return value
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (value.astype(np.float16) != value) & (np.abs(value) < MIN_FP16_OVERFLOW)
        power = np.spacing(np.abs(value)) / np.finfo(value.dtype).eps
        moved = value + unit * power * random.integers(-units, units + 1, value.shape)
    return np.where(rounded, moved, value).astype(value.dtype)
