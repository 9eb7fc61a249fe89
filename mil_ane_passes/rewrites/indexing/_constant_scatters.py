"""Scatters at constant indices: the window, the pieces or the mask that they write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.query import get_const_value, get_static_shape, is_symbolic
from ._index_patterns import Run, find_ascending_run

__all__ = [
    "ScatterTarget",
    "infer_window_shape",
    "iterate_window_shapes",
    "read_scatter_target",
    "split_indices_by_axis",
]

Array = np.ndarray[Any, Any]
_MAX_WINDOW_INDICES = 1 << 22
"""Most indices of a window that are listed one by one.

A longer list takes more time and memory than all other rules.
"""


@dataclass(frozen=True)
class ScatterTarget:
    """The flat indices `places` that a scatter writes, row by row over the neighbouring axes from `first` on.

    `extents` are the extents of these axes.
    """

    first: int
    extents: tuple[int, ...]
    places: Array
    mode: str = "update"

    @property
    def size(self) -> int:
        return math.prod(self.extents)

    def shape(self, data: Var, inner: tuple[int, ...]) -> list[Any]:
        """Return the shape of `data` with `inner` in place of the axes of the group."""
        return [*data.shape[:self.first], *inner, *data.shape[self.first + len(self.extents):]]


def read_scatter_target(op: Operation) -> ScatterTarget | str:
    """Return the indices that `op` writes, or why they cannot be read.

    `op` is a scatter with constant indices or a slice_update with a constant window.
    """
    if op.op_type == "slice_update":
        return _read_slice_update(op)
    data, indices, mode = op.data, np.asarray(op.indices.val).astype(np.int64), str(op.mode.val)
    axis = 0 if op.op_type == "scatter_nd" else int(op.axis.val) % data.rank
    if op.op_type == "scatter_nd":
        axes, columns = range(indices.shape[-1]), list(np.moveaxis(indices, -1, 0))
    else:
        axes, columns = range(axis, axis + 1), [indices]
    if op.op_type == "scatter_along_axis":
        line = indices[tuple(slice(None) if each == axis else slice(0, 1) for each in range(data.rank))]
        if get_static_shape(data) is None:
            return "its other axes are of symbolic size, those of its places are not"
        if np.array_equal(indices, np.broadcast_to(line, indices.shape)):
            columns = [line]
        else:
            axes, columns = range(data.rank), list(np.indices(indices.shape))
            columns[axis] = indices
    extents = tuple(data.shape[axis] for axis in axes)
    if any(map(is_symbolic, extents)):
        return "it writes to places of an axis of symbolic size"
    if any(np.any((column < -extent) | (column >= extent)) for column, extent in zip(columns, extents)):
        return "a place is outside of its axis"
    columns = [np.where(column < 0, column + extent, column) for column, extent in zip(columns, extents)]
    places = np.ravel_multi_index(tuple(np.broadcast_arrays(*columns)), extents).reshape(-1)
    return _check_unique_indices(ScatterTarget(axes[0], extents, places, mode))


def _check_unique_indices(group: ScatterTarget) -> ScatterTarget | str:
    if not len(group.places):
        return "it writes nothing"
    if len(np.unique(group.places)) < len(group.places):
        return "it writes to one place twice, and which one stays is not stated"
    return group


def _read_slice_update(op: Operation) -> ScatterTarget | str:
    rank, shape = op.x.rank, get_static_shape(op.x)
    begin, end = get_const_value(op.begin), get_const_value(op.end)
    if shape is None or begin is None or end is None:
        return "its window is computed, or its shape symbolic"
    stride = get_const_value(op.stride) or [1] * rank
    free = {
        name: get_const_value(op.inputs.get(name)) or [False] * rank
        for name in ("begin_mask", "end_mask", "squeeze_mask")
    }
    lines: list[range] = []
    for axis, extent in enumerate(shape):
        if free["squeeze_mask"][axis]:
            if not -extent <= begin[axis] < extent:
                return "a place is outside of its axis"
            lines.append(range(int(begin[axis]) % extent, int(begin[axis]) % extent + 1))
            continue
        first, last = (None if free[f"{side}_mask"][axis] else int(given[axis])
                       for side, given in (("begin", begin), ("end", end)))
        lines.append(range(extent)[first:last:int(stride[axis])])
    cut = [axis for axis, extent in enumerate(shape) if lines[axis] != range(extent)] or [0]
    axes = slice(cut[0], cut[-1] + 1)  # other axes are written entirely: their indices are not listed
    count = math.prod(map(len, lines[axes]))
    if count > _MAX_WINDOW_INDICES:
        return f"its window has {count} places, above {_MAX_WINDOW_INDICES}"
    lists = [np.arange(line.start, line.stop, line.step) for line in lines[axes]]
    return _check_unique_indices(
        ScatterTarget(cut[0], shape[axes], np.ravel_multi_index(np.ix_(*lists), shape[axes]).reshape(-1))
    )


def iterate_window_shapes(
    group: ScatterTarget, known: tuple[int, ...] | None
) -> Iterator[tuple[tuple[int, ...], list[Run]]]:
    """Yield shapes of the group in which its indices are a window, evenly spaced along each axis; the simplest first.

    `known` is a shape that the group had before it was reshaped to one axis.
    """
    for shape in dict.fromkeys((group.extents, known, infer_window_shape(group.places, group.size))):
        lists = split_indices_by_axis(group.places, shape) if shape else None
        runs = [find_ascending_run(line) for line in lists or ()]
        if shape and runs and None not in runs:
            yield shape, [run for run in runs if run is not None]


def split_indices_by_axis(places: Array, shape: tuple[int, ...]) -> list[Array] | None:
    """Split flat `places` in `shape` into one list for each axis; None unless they are all combinations, in order."""
    points = np.unravel_index(places, shape)
    counts = [len(np.unique(line)) for line in points]
    if math.prod(counts) != len(places):
        return None
    lists = [np.moveaxis(line.reshape(counts), axis, 0).reshape(counts[axis], -1)[:, 0]
             for axis, line in enumerate(points)]
    whole = np.ravel_multi_index(np.ix_(*lists), shape).reshape(-1)
    return lists if np.array_equal(whole, places) else None


def infer_window_shape(places: Array, extent: int) -> tuple[int, ...] | None:
    """Infer a shape of `extent` elements in which nested, evenly spaced `places` are a window; None if not found."""
    strides: list[int] = []
    line = places
    while len(line) > 1:
        jumps = np.diff(line)
        step = int(jumps[0])
        count = int(np.argmax(jumps != step)) + 1 if np.any(jumps != step) else len(line)
        if step <= 0 or len(line) % count or not np.array_equal(
                line.reshape(-1, count) - line[::count, None], np.broadcast_to(
                    np.arange(count) * step, (len(line) // count, count))):
            return None
        strides.append(step)
        line = line[::count]
    extents = [extent, *reversed(strides)]
    if any(outer % inner for outer, inner in pairwise(extents)):
        return None
    shape = tuple(outer // inner for outer, inner in pairwise(extents))
    return (*shape, extents[-1]) if extents[-1] > 1 and strides else shape or None
