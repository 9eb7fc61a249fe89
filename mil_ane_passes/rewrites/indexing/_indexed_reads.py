"""Reads of constant indices along an axis by slices, a concat, a reverse or a transpose."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from coremltools.converters.mil.mil import Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_symbolic
from ._index_patterns import IndexPattern, Repeated, Run, RunSequence, Tiled, TransposedRun

__all__ = ["find_reshape_obstacle", "find_take_obstacle", "reshape_value", "slice_runs", "take_indices"]

_SPLIT_DTYPES = (types.fp16, types.fp32, types.int32, types.bool)
_MAX_RANK = 5
"Most axes that are supported on the ANE."


def find_take_obstacle(var: Var, places: IndexPattern) -> str:
    """Return why `take_indices` cannot read these indices, "" where it can."""
    while isinstance(places, Tiled):
        places = places.inner
    if not isinstance(places, (Repeated, TransposedRun)):
        return ""
    if var.rank >= _MAX_RANK:
        return f"{places.words()}: that needs one more axis than the {_MAX_RANK} that are supported on the ANE"
    return find_reshape_obstacle(var.shape) or (
        find_take_obstacle(var, places.inner) if isinstance(places, Repeated) else ""
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
    if isinstance(places, Repeated):
        once = take_indices(mb, var, axis, places.inner)
        apart = mb.expand_dims(x=once, axes=[axis + 1])
        wide = mb.concat(values=[apart] * places.times, axis=axis + 1)
        shape[axis] = once.shape[axis] * places.times
        return reshape_value(mb, wide, shape)
    if isinstance(places, TransposedRun):
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
    whole = [axis not in runs for axis in range(var.rank)]
    begin = [0 if axis not in runs else runs[axis].start for axis in range(var.rank)]
    end = [0 if axis not in runs else runs[axis].start + (runs[axis].count - 1) * runs[axis].step + 1
           for axis in range(var.rank)]
    parameters: dict[str, Any] = {"begin": begin, "end": end}
    if any(run.step != 1 for run in runs.values()):
        parameters["stride"] = [runs[axis].step if axis in runs else 1 for axis in range(var.rank)]
    if any(whole):
        parameters |= {"begin_mask": whole, "end_mask": whole}
    if squeeze:
        parameters["squeeze_mask"] = [not each for each in whole]
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
    again: Var = mb.reshape(x=var, shape=[-1 if is_symbolic(extent) else int(extent) for extent in shape])
    return again
