"""Patterns of constant indices along an axis: runs, repetitions, tilings and transposed runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "IndexPattern",
    "Repeated",
    "Run",
    "RunSequence",
    "Tiled",
    "TransposedRun",
    "find_ascending_run",
    "find_index_pattern",
    "split_points_by_axis",
]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Run:
    """`count` indices that are `step` apart, from `start` on; `step` may be negative, and is 1 for a single index."""

    start: int
    step: int
    count: int

    @property
    def parts(self) -> int:
        return 1

    def words(self) -> str:
        return "one slice" if self.step > 0 else "a slice in reverse"


@dataclass(frozen=True)
class _Repetition:
    """`inner` repeated several times."""

    inner: IndexPattern
    times: int

    @property
    def parts(self) -> int:
        return self.inner.parts * self.times


class Repeated(_Repetition):
    """Each index of `inner` `times` in a row."""

    def words(self) -> str:
        return f"{self.inner.words()}, each place {self.times} times"


class Tiled(_Repetition):
    """All of `inner`, `times` in a row."""

    def words(self) -> str:
        return f"{self.inner.words()}, {self.times} times"


@dataclass(frozen=True)
class TransposedRun:
    """A run, reshaped to `rows` times `columns` and read column by column."""

    run: Run
    rows: int
    columns: int

    @property
    def parts(self) -> int:
        return 2

    def words(self) -> str:
        return f"a transpose of {self.rows} times {self.columns}"


@dataclass(frozen=True)
class RunSequence:
    """Several runs in sequence."""

    runs: tuple[Run, ...]

    @property
    def parts(self) -> int:
        return len(self.runs)

    def words(self) -> str:
        return f"{len(self.runs)} slices and a concat"


IndexPattern = Run | Repeated | Tiled | TransposedRun | RunSequence


def find_index_pattern(places: Sequence[int] | Array) -> IndexPattern:
    """Return `places`, at least one and none negative, as the pattern that needs the fewest slices."""
    array = np.asarray(places, np.int64).reshape(-1)
    run = _find_run(array)
    if run is not None:
        return run
    changes = np.flatnonzero(np.diff(array)) + 1
    times = math.gcd(len(array), *changes.tolist())
    if times > 1:
        return Repeated(find_index_pattern(array[::times]), times)
    for period in _list_divisors(len(array)):
        if np.array_equal(array[period:], array[:-period]):
            return Tiled(find_index_pattern(array[:period]), len(array) // period)
    for columns in _list_divisors(len(array))[1:]:
        turned = _find_transposed_run(array, columns)
        if turned is not None:
            return turned
    return RunSequence(tuple(_split_into_runs(array)))


def find_ascending_run(array: Array) -> Run | None:
    """Return `array` as an ascending run, or None."""
    run = _find_run(np.asarray(array, np.int64).reshape(-1))
    return run if run is not None and run.step > 0 else None


def _find_run(array: Array) -> Run | None:
    if len(array) == 1:
        return Run(int(array[0]), 1, 1)
    step = int(array[1] - array[0]) if len(array) else 0
    if step == 0 or not np.all(np.diff(array) == step):
        return None
    return Run(int(array[0]), step, len(array))


def _list_divisors(number: int) -> list[int]:
    """List the divisors of `number` below it, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)} - {number})


def _find_transposed_run(array: Array, columns: int) -> TransposedRun | None:
    """Return `array` as a run that is read column by column, or None.

    `array` itself, in the order of reading, has `columns` columns.
    """
    rows = len(array) // columns
    if rows < 2 or array[1] - array[0] != (array[columns] - array[0]) * rows or array[columns] <= array[0]:
        return None
    run = _find_run(array.reshape(rows, columns).T.reshape(-1))
    return None if run is None else TransposedRun(run, columns, rows)


def _split_into_runs(array: Array) -> list[Run]:
    """Split `array` into runs greedily.

    Adjacent indices in order make one run, and so do three and more evenly spaced indices.
    """
    found, at = [], 0
    jumps = np.diff(array)
    ends = np.flatnonzero(np.diff(jumps)) + 1  # the last index of each sequence of equal differences
    while at < len(array):
        if at == len(array) - 1:
            found.append(Run(int(array[at]), 1, 1))
            break
        step = int(jumps[at])
        behind = np.searchsorted(ends, at, side="right")
        last = int(ends[behind]) if behind < len(ends) else len(array) - 1
        count = last - at + 1
        if step != 1 and (step == 0 or count < 3):
            count, step = 1, 1
        found.append(Run(int(array[at]), step, count))
        at += count
    return found


def split_points_by_axis(columns: Sequence[Array]) -> list[Array] | None:
    """Split the coordinates of points into one list for each axis; None where that is impossible.

    `columns` are arrays of one shape, one for each axis. They split where the points, row by row, are all combinations
    of the lists, the last axis fastest.
    """
    shape = columns[0].shape
    lists, free = [], 0
    for column in columns:
        vary = [axis for axis in range(len(shape)) if shape[axis] > 1 and not np.all(
            column == np.take(column, [0], axis))]
        if vary and vary[0] < free:
            return None
        line = column[tuple(slice(None) if axis in vary else 0 for axis in range(len(shape)))]
        lists.append(line.reshape(-1))
        free = vary[-1] + 1 if vary else free
    whole = math.prod(len(each) for each in lists) == math.prod(shape)
    return lists if whole else None
