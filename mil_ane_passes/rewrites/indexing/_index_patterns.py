"""Patterns of constant indices along an axis: runs, repetitions, tilings and transposed runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_reshape_extents, is_symbolic

__all__ = [
    "IndexPattern",
    "Run",
    "RunSequence",
    "Tiled",
    "find_ascending_run",
    "find_index_pattern",
    "find_reshape_obstacle",
    "find_take_obstacle",
    "reshape_value",
    "slice_runs",
    "split_points_by_axis",
    "take_indices",
]


_Array = np.ndarray[Any, Any]
_SPLIT_DTYPES = (types.fp16, types.fp32, types.int32, types.bool)
_MAX_RANK = 5
"Most axes that are supported on the ANE."


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


class _Repeated(_Repetition):
    """Each index of `inner` `times` in a row."""

    def words(self) -> str:
        return f"{self.inner.words()}, each index {self.times} times"


class Tiled(_Repetition):
    """All of `inner`, `times` in a row."""

    def words(self) -> str:
        return f"{self.inner.words()}, {self.times} times"


@dataclass(frozen=True)
class _TransposedRun:
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


IndexPattern = Run | _Repeated | Tiled | _TransposedRun | RunSequence


def find_index_pattern(places: Sequence[int] | _Array) -> IndexPattern:
    """Return `places`, at least one and none negative, as the pattern that needs the fewest slices."""
    array = np.asarray(places, np.int64).reshape(-1)
    run = _find_run(array)
    if run is not None:
        return run
    changes = np.flatnonzero(np.diff(array)) + 1
    times = math.gcd(len(array), *changes.tolist())
    if times > 1:
        return _Repeated(find_index_pattern(array[::times]), times)
    for period in _list_divisors(len(array)):
        if np.array_equal(array[period:], array[:-period]):
            return Tiled(find_index_pattern(array[:period]), len(array) // period)
    for columns in _list_divisors(len(array))[1:]:
        turned = _find_transposed_run(array, columns)
        if turned is not None:
            return turned
    return RunSequence(tuple(_split_into_runs(array)))


def find_ascending_run(array: _Array) -> Run | None:
    """Return `array` as an ascending run, or None."""
    run = _find_run(np.asarray(array, np.int64).reshape(-1))
    return run if run is not None and run.step > 0 else None


def _find_run(array: _Array) -> Run | None:
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


def _find_transposed_run(array: _Array, columns: int) -> _TransposedRun | None:
    """Return `array` as a run that is read column by column, or None.

    `array` itself, in the order of reading, has `columns` columns.
    """
    rows = len(array) // columns
    if rows < 2 or array[1] - array[0] != (array[columns] - array[0]) * rows or array[columns] <= array[0]:
        return None
    run = _find_run(array.reshape(rows, columns).T.reshape(-1))
    return None if run is None else _TransposedRun(run, columns, rows)


def _split_into_runs(array: _Array) -> list[Run]:
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


def split_points_by_axis(columns: Sequence[_Array]) -> list[_Array] | None:
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
    return lists if math.prod(map(len, lists)) == math.prod(shape) else None


def find_take_obstacle(var: Var, places: IndexPattern) -> str:
    """Return why `take_indices` cannot read these indices, "" where it can."""
    while isinstance(places, Tiled):
        places = places.inner
    if not isinstance(places, (_Repeated, _TransposedRun)):
        return ""
    if var.rank >= _MAX_RANK:
        return f"{places.words()}: this needs one more axis than the {_MAX_RANK} that are supported on the ANE"
    return find_reshape_obstacle(var.shape) or (
        find_take_obstacle(var, places.inner) if isinstance(places, _Repeated) else ""
    )


def find_reshape_obstacle(shape: Sequence[Any]) -> str:
    """Return why no reshape can produce this shape, "" where one can."""
    unknown = sum(map(is_symbolic, shape))
    return "" if unknown <= 1 else f"{unknown} dimensions of symbolic size cannot be reshaped"


def take_indices(mb: RewriteBuilder, var: Var, axis: int, places: IndexPattern) -> Var:
    """Read the elements of `var` at `places` of `axis`, in their order."""
    shape = list(var.shape)
    if isinstance(places, Run):
        return _slice_run(mb, var, axis, places)
    if isinstance(places, Tiled):
        once = take_indices(mb, var, axis, places.inner)
        return mb.concat(values=[once] * places.times, axis=axis)
    if isinstance(places, _Repeated):
        once = take_indices(mb, var, axis, places.inner)
        apart = mb.expand_dims(x=once, axes=[axis + 1])
        wide = mb.concat(values=[apart] * places.times, axis=axis + 1)
        shape[axis] = once.shape[axis] * places.times
        return reshape_value(mb, wide, shape)
    if isinstance(places, _TransposedRun):
        line = _slice_run(mb, var, axis, places.run)
        grid = reshape_value(mb, line, [*shape[:axis], places.rows, places.columns, *shape[axis + 1:]])
        order = list(range(len(shape) + 1))
        order[axis], order[axis + 1] = axis + 1, axis
        shape[axis] = places.rows * places.columns
        return reshape_value(mb, mb.transpose(x=grid, perm=order), shape)
    return _concat_runs(mb, var, axis, places)


def _slice_run(mb: RewriteBuilder, var: Var, axis: int, run: Run) -> Var:
    if run.step > 0:
        return slice_runs(mb, var, {axis: run})
    last = run.start + (run.count - 1) * run.step
    forward = slice_runs(mb, var, {axis: Run(last, -run.step, run.count)})
    turned: Var = mb.reverse(x=forward, axes=[axis])
    return turned


def slice_runs(mb: RewriteBuilder, var: Var, runs: dict[int, Run], squeeze: bool = False) -> Var:
    """Read an ascending run of each of some axes in one slice; `squeeze` drops these axes.

    Return `var` itself where the runs cover all of it.
    """
    runs = {axis: run for axis, run in runs.items() if squeeze or run != Run(0, 1, var.shape[axis])}
    if not runs:
        return var
    is_uncut = [axis not in runs for axis in range(var.rank)]
    begin = [0 if axis not in runs else runs[axis].start for axis in range(var.rank)]
    end = [0 if axis not in runs else runs[axis].start + (runs[axis].count - 1) * runs[axis].step + 1
           for axis in range(var.rank)]
    parameters: dict[str, Any] = {"begin": begin, "end": end}
    if any(run.step != 1 for run in runs.values()):
        parameters["stride"] = [runs[axis].step if axis in runs else 1 for axis in range(var.rank)]
    if any(is_uncut):
        parameters |= {"begin_mask": is_uncut, "end_mask": is_uncut}
    if squeeze:
        parameters["squeeze_mask"] = [axis in runs for axis in range(var.rank)]
    sliced: Var = mb.slice_by_index(x=var, **parameters)
    return sliced


def _concat_runs(mb: RewriteBuilder, var: Var, axis: int, places: RunSequence) -> Var:
    """Concat the runs: contiguous ones are parts of one split, runs with gaps are sliced one by one."""
    runs = places.runs
    if any(run.step != 1 for run in runs) or var.dtype not in _SPLIT_DTYPES:
        joined: Var = mb.concat(values=[_slice_run(mb, var, axis, run) for run in runs], axis=axis)
        return joined
    extent = int(var.shape[axis])
    ends = sorted({0, extent, *(run.start for run in runs), *(run.start + run.count for run in runs)})
    parts = mb.split(x=var, split_sizes=[after - before for before, after in pairwise(ends)], axis=axis)
    at = dict(zip(ends, parts))
    values = [at[end] for run in runs for end in ends if run.start <= end < run.start + run.count]
    return mb.concat(values=values, axis=axis)


def reshape_value(mb: RewriteBuilder, var: Var, shape: Sequence[Any]) -> Var:
    """Reshape `var` to another shape of as many elements; axes of extent 1 are added or dropped without a reshape."""
    shape = list(shape)
    if list(var.shape) == shape:
        return var
    ones = [axis for axis, extent in enumerate(var.shape) if not is_symbolic(extent) and extent == 1]
    if [extent for axis, extent in enumerate(var.shape) if axis not in ones] == shape:
        bare: Var = mb.squeeze(x=var, axes=ones)
        return bare
    added = [axis for axis, extent in enumerate(shape) if not is_symbolic(extent) and extent == 1]
    if [extent for axis, extent in enumerate(shape) if axis not in added] == list(var.shape):
        wide: Var = mb.expand_dims(x=var, axes=added)
        return wide
    again: Var = mb.reshape(x=var, shape=get_reshape_extents(shape))
    return again
