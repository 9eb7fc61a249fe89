"""Gathers at constant indices: which indices of which axes they read, and the same reads without a gather."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_static_shape, is_symbolic
from ._index_patterns import (
    IndexPattern,
    Run,
    RunSequence,
    Tiled,
    find_index_pattern,
    find_reshape_obstacle,
    find_take_obstacle,
    reshape_value,
    slice_runs,
    split_points_by_axis,
    take_indices,
)

__all__ = ["GATHER_OPS", "build_gather_from_slices", "evaluate_gather", "find_out_of_range_index", "plan_gather"]

GATHER_OPS = ("gather", "gather_nd", "gather_along_axis")
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _GatherPlan:
    """The indices that are read of each axis of `x`, which is first reshaped to `shape` unless that is None."""

    shape: tuple[int, ...] | None
    axis_patterns: tuple[tuple[int, IndexPattern], ...]

    @property
    def parts(self) -> int:
        """Return the number of values that are joined, 1 where none are."""
        return math.prod(places.parts for _, places in self.axis_patterns)

    @property
    def plain(self) -> bool:
        """Return whether a single slice, or no op at all, is enough."""
        return all(isinstance(places, Run) and places.step > 0 for _, places in self.axis_patterns)

    def words(self) -> str:
        kinds = [places.words() for _, places in self.axis_patterns]
        if self.plain:
            return "one slice" if kinds else "all of it in another shape"
        return " of ".join(dict.fromkeys(kind for kind in kinds if kind != "one slice"))


def plan_gather(op: Operation) -> _GatherPlan | str:
    """Plan the reads of `op`, whose indices are constant, or return why it cannot be replaced."""
    indices = np.asarray(op.indices.val).astype(np.int64)
    batch = int(get_const_value(op.inputs.get("batch_dims"), 0))
    if indices.size == 0:
        return "it takes nothing"
    if batch:
        shared = indices.reshape(-1, *indices.shape[batch:])
        if not np.array_equal(shared, np.broadcast_to(shared[:1], shared.shape)):
            return "its places differ from batch to batch"
        indices = shared[0]
    plan = {"gather": _plan_plain_gather, "gather_nd": _plan_gather_nd, "gather_along_axis": _plan_gather_along_axis}[
        op.op_type
    ](op, indices, batch)
    return plan if isinstance(plan, str) else _validate_plan(op, plan)


def _validate_plan(op: Operation, plan: _GatherPlan) -> _GatherPlan | str:
    for _, places in plan.axis_patterns:
        reason = find_take_obstacle(op.x, places)
        if reason and plan.shape is None:
            return reason
    shape = plan.shape or op.x.shape
    partial = [(axis, places) for axis, places in plan.axis_patterns if places != Run(0, 1, shape[axis])]
    straight = plan.shape is None and op.op_type != "gather_nd" and op.x.rank - op.outputs[0].rank in (0, 1)
    return ("" if straight else find_reshape_obstacle(op.outputs[0].shape)) or _GatherPlan(plan.shape, tuple(partial))


def _normalize_indices(indices: _Array, extent: Any) -> _Array | str:
    """Return `indices` counted from the front, or why they cannot be."""
    if is_symbolic(extent):
        return "it takes places of an axis of symbolic size"
    wrong = indices[(indices < -extent) | (indices >= extent)]
    if wrong.size:
        return f"place {wrong[0]} is outside of the {extent} there are"
    return np.where(indices < 0, indices + extent, indices)


def _plan_plain_gather(op: Operation, indices: _Array, batch: int) -> _GatherPlan | str:
    axis = int(op.axis.val) % op.x.rank
    if is_symbolic(op.x.shape[axis]) and indices.size == 1 and (indices.min() >= 0 or not indices.ndim):
        return _GatherPlan(None, ((axis, Run(int(indices.reshape(-1)[0]), 1, 1)),))
    places = _normalize_indices(indices, op.x.shape[axis])
    return places if isinstance(places, str) else _GatherPlan(None, ((axis, find_index_pattern(places)),))


def _plan_gather_along_axis(op: Operation, indices: _Array, batch: int) -> _GatherPlan | str:
    axis = int(op.axis.val) % op.x.rank
    shape, places = get_static_shape(op.x), _normalize_indices(indices, op.x.shape[axis])
    if shape is None or isinstance(places, str):
        return places if isinstance(places, str) else "its other axes are of symbolic size, those of its places are not"
    line = places[tuple(slice(None) if each == axis else slice(0, 1) for each in range(op.x.rank))]
    if np.array_equal(places, np.broadcast_to(line, places.shape)):
        return _GatherPlan(None, ((axis, find_index_pattern(line)),))
    grid: list[_Array] = list(np.indices(indices.shape))
    grid[axis] = places
    return _plan_flattened_gather(grid, shape, shape)


def _plan_gather_nd(op: Operation, indices: _Array, batch: int) -> _GatherPlan | str:
    columns = []
    axes = range(batch, batch + indices.shape[-1])
    for axis, column in zip(axes, np.moveaxis(indices, -1, 0)):
        places = _normalize_indices(column, op.x.shape[axis])
        if isinstance(places, str):
            return places
        columns.append(places)
    apart = split_points_by_axis(columns)
    if apart is not None:
        return _GatherPlan(None, tuple((axis, find_index_pattern(line)) for axis, line in zip(axes, apart)))
    if batch or any(map(is_symbolic, op.x.shape)):
        return "its points are no combination of places of each axis, and the axes before or behind are not fixed"
    return _plan_flattened_gather(columns, tuple(op.x.shape[axis] for axis in axes), tuple(op.x.shape))


def _plan_flattened_gather(columns: list[_Array], extents: tuple[int, ...], shape: tuple[int, ...]) -> _GatherPlan:
    """Plan a gather of points: the axes that the indices run over are flattened to one."""
    places = np.ravel_multi_index(tuple(np.broadcast_arrays(*columns)), extents)
    return _GatherPlan((math.prod(extents), *shape[len(extents):]), ((0, find_index_pattern(places)),))


def build_gather_from_slices(mb: RewriteBuilder, op: Operation, plan: _GatherPlan, aside: bool) -> Var:
    """Build the output of `op` from slices.

    With `aside`, several slices of a last axis are joined along another axis.
    """
    var, out = op.x, op.outputs[0]
    if plan.shape is not None:
        var = reshape_value(mb, var, plan.shape)
    straight = {axis: places for axis, places in plan.axis_patterns if isinstance(places, Run) and places.step > 0}
    dropped = [extent for axis, extent in enumerate(var.shape) if axis not in straight]
    if straight and len(straight) == len(plan.axis_patterns) and len(dropped) == out.rank and \
            all(run.count == 1 for run in straight.values()):
        return slice_runs(mb, var, straight, squeeze=True)
    var = slice_runs(mb, var, straight, squeeze=False)
    for axis, places in plan.axis_patterns:
        if axis not in straight:
            var = (
                _take_last_axis_transposed(mb, var, axis, places)
                if aside and axis == var.rank - 1
                else take_indices(mb, var, axis, places)
            )
    return reshape_value(mb, var, out.shape)


def _take_last_axis_transposed(mb: RewriteBuilder, var: Var, axis: int, places: IndexPattern) -> Var:
    """Apply `take_indices` to the last axis, swapped with the axis before it while values are joined."""
    if not isinstance(places, (RunSequence, Tiled)):
        return take_indices(mb, var, axis, places)
    if var.rank == 1:
        column: Var = take_indices(mb, mb.expand_dims(x=var, axes=[1]), 0, places)
        line: Var = mb.squeeze(x=column, axes=[1])
        return line
    order = [*range(axis - 1), axis, axis - 1]
    back: Var = mb.transpose(x=take_indices(mb, mb.transpose(x=var, perm=order), axis - 1, places), perm=order)
    return back


def find_out_of_range_index(op: Operation) -> str:
    """Return why a constant index of `op` is outside of its table, or "" where all are inside."""
    indices, batch = np.asarray(op.indices.val).astype(np.int64), int(get_const_value(op.inputs.get("batch_dims"), 0))
    if op.op_type == "gather_nd":
        found = [
            _normalize_indices(column, op.x.shape[batch + axis])
            for axis, column in enumerate(np.moveaxis(indices, -1, 0))
        ]
    else:
        found = [_normalize_indices(indices, op.x.shape[int(op.axis.val) % op.x.rank])]
    return next((reason for reason in found if isinstance(reason, str)), "")


def evaluate_gather(op: Operation) -> _Array:
    """Compute the output of `op` where both its table and its indices are constant."""
    table, indices = np.asarray(op.x.val), np.asarray(op.indices.val).astype(np.int64)
    batch = int(get_const_value(op.inputs.get("batch_dims"), 0))
    if op.op_type == "gather_along_axis":
        return np.take_along_axis(table, indices, int(op.axis.val))
    if op.op_type == "gather" and not batch:
        return np.take(table, indices, int(op.axis.val))
    if op.op_type == "gather":
        axis = int(op.axis.val) % table.ndim
        fronts = [np.take(table[at], indices[at], axis - batch) for at in np.ndindex(*indices.shape[:batch])]
        joined: _Array = np.stack(fronts).reshape(*indices.shape[:batch], *fronts[0].shape)
        return joined
    lead = np.indices(indices.shape[:-1], sparse=True)[:batch]
    places = (*lead, *np.moveaxis(indices, -1, 0))
    found: _Array = table[places]
    return found
