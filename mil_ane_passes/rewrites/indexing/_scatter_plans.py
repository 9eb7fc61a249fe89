"""Plans of scatters at constant indices: the form in which each is written, and its ops."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_consumers, get_itemsize, get_static_shape, is_const, is_symbolic
from ._constant_scatters import ScatterTarget, iterate_window_shapes, read_scatter_target
from ._index_patterns import Run, find_index_pattern
from ._indexed_reads import find_reshape_obstacle, reshape_value
from ._indexed_updates import (
    SELECT_DTYPES,
    find_window_obstacle,
    make_combiner,
    pad_update_with_zeros,
    read_uniform_value,
    select_by_mask,
    split_into_segments,
    write_segments,
    write_window,
)

__all__ = ["ScatterPlan", "build_scatter_plan", "plan_scatter"]

_MAX_RANK = 5
"Most axes that are supported on the ANE."
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ScatterPlan:
    """The form of a scatter to `group`, reshaped to `inner`: a window of `runs`, or (None) indices of one axis."""

    group: ScatterTarget
    inner: tuple[int, ...]
    runs: dict[int, Run] | None
    form: str
    words: str


def _get_data_and_update(op: Operation) -> tuple[Var, Var]:
    return (op.x, op.update) if op.op_type == "slice_update" else (op.data, op.updates)


def plan_scatter(op: Operation, max_parts: int, max_bytes: int) -> ScatterPlan | str:
    """Plan how to write `op` without a scatter, or return why that is impossible."""
    group = read_scatter_target(op)
    if isinstance(group, str):
        return group
    data, new = _get_data_and_update(op)
    if group.mode != "update" and not types.is_float(data.dtype):
        return "it computes on integers"
    if _count_elements(new.shape) != _count_elements(group.shape(data, (len(group.places),))):
        return "its update is of another shape than its places"
    plan = _plan_window(data, new, group, max_bytes)
    if isinstance(plan, ScatterPlan):
        return plan
    found = split_into_segments(group.places, group.size)
    count = len(found) + (0 if group.mode == "update" else find_index_pattern(group.places).parts)
    seen = find_reshape_obstacle(group.shape(data, (group.size,))) if len(group.extents) > 1 else ""
    if count <= max_parts and not seen:
        return ScatterPlan(group, (group.size,), None, "pieces", f"{len(found)} pieces")
    whole = get_static_shape(data)
    if whole is not None and is_const(new) and data.dtype in SELECT_DTYPES:
        size = math.prod(whole) * get_itemsize(data) + group.size
        if size <= max_bytes:
            return ScatterPlan(group, (group.size,), None, "spread", f"a select of a constant, {size} bytes")
        return f"{count} values to join, above {max_parts}, and {size} bytes to choose from, above {max_bytes}"
    return plan or seen or f"{count} values to join, above {max_parts}"


def _count_elements(shape: Sequence[Any]) -> tuple[int, int]:
    """Return the number of elements along the axes of known size, and the number of other axes."""
    known = [int(extent) for extent in shape if not is_symbolic(extent)]
    return math.prod(known), len(shape) - len(known)


def _plan_window(data: Var, new: Var, group: ScatterTarget, max_bytes: int) -> ScatterPlan | str:
    """Plan the cheapest window: by a select, else a contiguous window, else a strided one; or return why not."""
    reason, found = "", list[ScatterPlan]()
    for inner, all_runs in iterate_window_shapes(group, _find_shape_before_reshape(data)):
        shape = group.shape(data, inner)
        runs = {group.first + axis: run for axis, run in enumerate(all_runs) if run != Run(0, 1, inner[axis])}
        mask = math.prod(int(shape[axis]) for axis in runs)
        single = all(run.count == 1 for run in runs.values())
        if inner != group.extents and (len(shape) > _MAX_RANK or find_reshape_obstacle(shape)):
            continue
        if (
            runs
            and (single or read_uniform_value(new) is not None)
            and data.dtype in SELECT_DTYPES
            and mask <= max_bytes
        ):
            return ScatterPlan(group, inner, runs, "select", "a select with a constant mask")
        reason = find_window_obstacle(shape, runs)
        if not reason:
            found.append(
                ScatterPlan(
                    group,
                    inner,
                    runs,
                    "window",
                    f"a window of {_format_axis_count(len(runs))}" if runs else "all of it",
                )
            )
    found.sort(key=lambda plan: any(run.step > 1 for run in (plan.runs or {}).values()))
    return found[0] if found else reason


def _format_axis_count(count: int) -> str:
    return "one axis" if count == 1 else f"{count} axes"


def _find_shape_before_reshape(data: Var) -> tuple[int, ...] | None:
    """Return the shape of a one-axis value before its reshape, or None."""
    if data.rank != 1 or data.op is None or data.op.op_type != "reshape":
        return None
    return get_static_shape(data.op.x)


def build_scatter_plan(mb: RewriteBuilder, op: Operation, plan: ScatterPlan) -> dict[Var, Var]:
    """Build the plan; return the replacement of the result, or of the reshape that is its only reader."""
    data, new = _get_data_and_update(op)
    group, out = plan.group, op.outputs[0]
    shape = group.shape(data, plan.inner)
    made = _build_result(mb, _reshape_at_source(mb, data, shape), new, plan)
    readers = get_consumers(out)
    alone = len(readers) == 1 and not out.consuming_blocks and shape != list(out.shape)
    if alone and readers[0].op_type == "reshape" and list(readers[0].outputs[0].shape) == shape:
        return {readers[0].outputs[0]: made}
    return {out: reshape_value(mb, made, out.shape)}


def _build_result(mb: RewriteBuilder, data: Var, new: Var, plan: ScatterPlan) -> Var:
    group, combine = plan.group, make_combiner(plan.group.mode)
    if plan.form == "pieces":
        fresh = _reshape_at_source(mb, new, _replace_extents(data, {group.first: len(group.places)}))
        return write_segments(mb, data, group.first, group.places, fresh, combine, group.mode == "update")
    if plan.runs is None:
        mask = np.zeros(group.size, bool)
        mask[group.places] = True
        wide = mask.reshape([-1 if axis == group.first else 1 for axis in range(data.rank)])
        return select_by_mask(mb, data, wide, _scatter_const_update(mb, data, new, group), combine)
    number = read_uniform_value(new) if plan.form == "select" else None
    if number is not None:
        return select_by_mask(mb, data, _make_window_mask(data, plan.runs), number, combine)
    fresh = _reshape_at_source(mb, new, _replace_extents(data, {axis: run.count for axis, run in plan.runs.items()}))
    if plan.form == "select":
        return select_by_mask(mb, data, _make_window_mask(data, plan.runs), fresh, combine)
    padded = pad_update_with_zeros(mb, data, plan.runs, fresh) if group.mode == "update" else None
    return write_window(mb, data, plan.runs, fresh, combine) if padded is None else padded


def _replace_extents(data: Var, counts: dict[int, int]) -> list[Any]:
    return [counts.get(axis, extent) for axis, extent in enumerate(data.shape)]


def _make_window_mask(data: Var, runs: dict[int, Run]) -> Array:
    mask = np.zeros([int(extent) if axis in runs else 1 for axis, extent in enumerate(data.shape)], bool)
    chosen: list[Any] = [
        np.arange(run.start, run.start + run.count * run.step, run.step) if (run := runs.get(axis)) else [0]
        for axis in range(data.rank)]
    mask[np.ix_(*chosen)] = True
    return mask


def _scatter_const_update(mb: RewriteBuilder, data: Var, new: Var, group: ScatterTarget) -> Var:
    """Build a constant update with zeros at the indices that it does not write."""
    def make() -> Array:
        given = np.asarray(new.val).reshape(_replace_extents(data, {group.first: len(group.places)}))
        whole = np.zeros(tuple(data.shape), given.dtype)
        whole[(slice(None),) * group.first + (group.places,)] = given
        return whole

    return mb.weight(new, f"over_{group.size}_{hashlib.sha256(group.places.tobytes()).hexdigest()[:16]}", make)


def _reshape_at_source(mb: RewriteBuilder, var: Var, shape: Sequence[Any]) -> Var:
    """Reshape `var` to `shape`: view a constant's bytes, and use the input of an earlier reshape."""
    if list(var.shape) == list(shape):
        return var
    if is_const(var):
        return mb.reshaped(var, tuple(int(extent) for extent in shape))
    if var.op is not None and var.op.op_type == "reshape" and get_static_shape(var.op.x) is not None:
        return reshape_value(mb, var.op.x, shape)
    return reshape_value(mb, var, shape)
