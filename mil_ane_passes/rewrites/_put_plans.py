"""Which way a scatter at constant places is written, and writing it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..core.build import RewriteBuilder
from ..core.query import consumers, is_const, is_symbolic, itemsize, static_shape
from ._places import Run, arranged
from ._put import BLENDS, blend, cannot_put, combiner, even, pads, pieces, put, segments
from ._scatters import Group, group_of, windows
from ._take import cannot_show, shown

__all__ = ["Plan", "executed", "planned"]

_RANK = 5
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Plan:
    """`group`, shown in `inner`: a window of `runs` of axes of the data, or (None) the places of one axis."""

    group: Group
    inner: tuple[int, ...]
    runs: dict[int, Run] | None
    form: str
    words: str


def _ends(op: Operation) -> tuple[Var, Var]:
    return (op.x, op.update) if op.op_type == "slice_update" else (op.data, op.updates)


def planned(op: Operation, max_parts: int, max_bytes: int) -> Plan | str:
    """How `op` is written without a scatter; or why it is not."""
    group = group_of(op)
    if isinstance(group, str):
        return group
    data, new = _ends(op)
    if group.mode != "update" and not types.is_float(data.dtype):
        return "it computes on integers"
    if _count(new.shape) != _count(group.shape(data, (len(group.places),))):
        return "its update is of another shape than its places"
    plan = _as_window(data, new, group, max_bytes)
    if isinstance(plan, Plan):
        return plan
    found = segments(group.places, group.size)
    count = len(found) + (0 if group.mode == "update" else arranged(group.places).parts)
    seen = cannot_show(group.shape(data, (group.size,))) if len(group.extents) > 1 else ""
    if count <= max_parts and not seen:
        return Plan(group, (group.size,), None, "pieces", f"{len(found)} pieces")
    whole = static_shape(data)
    if whole is not None and is_const(new) and data.dtype in BLENDS:
        size = math.prod(whole) * itemsize(data) + group.size
        if size <= max_bytes:
            return Plan(group, (group.size,), None, "spread", f"a select of a constant, {size} bytes")
        return f"{count} values to join, above {max_parts}, and {size} bytes to choose from, above {max_bytes}"
    return plan or seen or f"{count} values to join, above {max_parts}"


def _count(shape: Sequence[Any]) -> tuple[int, int]:
    """How many elements there are along the axes of known size, and how many axes are not."""
    known = [int(extent) for extent in shape if not is_symbolic(extent)]
    return math.prod(known), len(shape) - len(known)


def _as_window(data: Var, new: Var, group: Group, max_bytes: int) -> Plan | str:
    """The cheapest window: by a select, else one whose neighbours stand together, else any; or why there is none."""
    reason, found = "", list[Plan]()
    for inner, all_runs in windows(group, _before(data)):
        shape = group.shape(data, inner)
        runs = {group.first + axis: run for axis, run in enumerate(all_runs) if run != Run(0, 1, inner[axis])}
        mask = math.prod(int(shape[axis]) for axis in runs)
        single = all(run.count == 1 for run in runs.values())
        if inner != group.extents and (len(shape) > _RANK or cannot_show(shape)):
            continue
        if runs and (single or even(new) is not None) and data.dtype in BLENDS and mask <= max_bytes:
            return Plan(group, inner, runs, "select", "a select with a constant mask")
        reason = cannot_put(shape, runs)
        if not reason:
            found.append(Plan(group, inner, runs, "window", f"a window of {_axes(len(runs))}" if runs else "all of it"))
    found.sort(key=lambda plan: any(run.step > 1 for run in (plan.runs or {}).values()))
    return found[0] if found else reason


def _axes(count: int) -> str:
    return "one axis" if count == 1 else f"{count} axes"


def _before(data: Var) -> tuple[int, ...] | None:
    """The shape that a value of one axis had before it was shown so."""
    if data.rank != 1 or data.op is None or data.op.op_type != "reshape":
        return None
    return static_shape(data.op.x)


def executed(mb: RewriteBuilder, op: Operation, plan: Plan) -> dict[Var, Var]:
    """Which value takes the place of which: the result's, or that of the reshape that alone reads it."""
    data, new = _ends(op)
    group, out = plan.group, op.outputs[0]
    shape = group.shape(data, plan.inner)
    made = _made(mb, _seen(mb, data, shape), new, plan)
    readers = consumers(out)
    alone = len(readers) == 1 and not out.consuming_blocks and shape != list(out.shape)
    if alone and readers[0].op_type == "reshape" and list(readers[0].outputs[0].shape) == shape:
        return {readers[0].outputs[0]: made}
    return {out: shown(mb, made, out.shape)}


def _made(mb: RewriteBuilder, data: Var, new: Var, plan: Plan) -> Var:
    group, combine = plan.group, combiner(plan.group.mode)
    if plan.form == "pieces":
        fresh = _seen(mb, new, _with(data, {group.first: len(group.places)}))
        return pieces(mb, data, group.first, group.places, fresh, combine, group.mode == "update")
    if plan.runs is None:
        mask = np.zeros(group.size, bool)
        mask[group.places] = True
        wide = mask.reshape([-1 if axis == group.first else 1 for axis in range(data.rank)])
        return blend(mb, data, wide, _spread(mb, data, new, group), combine)
    number = even(new) if plan.form == "select" else None
    if number is not None:
        return blend(mb, data, _mask(data, plan.runs), number, combine)
    fresh = _seen(mb, new, _with(data, {axis: run.count for axis, run in plan.runs.items()}))
    if plan.form == "select":
        return blend(mb, data, _mask(data, plan.runs), fresh, combine)
    padded = pads(mb, data, plan.runs, fresh) if group.mode == "update" else None
    return put(mb, data, plan.runs, fresh, combine) if padded is None else padded


def _with(data: Var, counts: dict[int, int]) -> list[Any]:
    return [counts.get(axis, extent) for axis, extent in enumerate(data.shape)]


def _mask(data: Var, runs: dict[int, Run]) -> Array:
    mask = np.zeros([int(extent) if axis in runs else 1 for axis, extent in enumerate(data.shape)], bool)
    chosen: list[Any] = [
        np.arange(run.start, run.start + run.count * run.step, run.step) if (run := runs.get(axis)) else [0]
        for axis in range(data.rank)]
    mask[np.ix_(*chosen)] = True
    return mask


def _spread(mb: RewriteBuilder, data: Var, new: Var, group: Group) -> Var:
    """A constant update with zeros for the places that it does not touch."""
    def make() -> Array:
        given = np.asarray(new.val).reshape(_with(data, {group.first: len(group.places)}))
        whole = np.zeros(tuple(data.shape), given.dtype)
        whole[(slice(None),) * group.first + (group.places,)] = given
        return whole

    return mb.weight(new, f"over_{group.size}_{hashlib.sha256(group.places.tobytes()).hexdigest()[:16]}", make)


def _seen(mb: RewriteBuilder, var: Var, shape: Sequence[Any]) -> Var:
    """`var` in `shape`: the same bytes of a constant, and what a reshape was made from rather than its result."""
    if list(var.shape) == list(shape):
        return var
    if is_const(var):
        return mb.reshaped(var, tuple(int(extent) for extent in shape))
    if var.op is not None and var.op.op_type == "reshape" and static_shape(var.op.x) is not None:
        return shown(mb, var.op.x, shape)
    return shown(mb, var, shape)
