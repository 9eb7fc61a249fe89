"""Read constant indices by slices and a concat instead of a gather."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_static_shape, is_const, is_symbolic
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite, Severity, Vendor
from ...passes.evidence import cite_ane_compiler_quirk, cite_m4_study
from ...passes.examples import make_example, make_weight
from ...passes.targets import Gate
from ...rules.indexing import ConstantGather
from ._constant_gathers import GATHER_OPS, normalize_indices
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

_Array = np.ndarray[Any, Any]
_BEFORE_M4 = Gate(last="m3")
"Generations on which no source reports a gather."
_LAST_AXIS_CONCAT_FAULT = Gate(first="a14", last="m2")
"Generations on which concatenated slices of the last axis are reported to be wrong."


class GatherAsSlices(Rewrite):
    """Replace a gather with constant indices by slices and a concat, or by one slice, reverse or transpose.

    why     Before M4 there is no report of a gather on the ANE through Core ML, whereas slices are supported on all
            chips; and a single slice, or an entire axis, needs no gather on any chip.
    when    gather, gather_nd and gather_along_axis with constant indices. A single slice or reverse: on every target.
            Several values that are concatenated: only for targets before M4, which supports such a gather, unless
            `always`. Indices of several axes are read axis by axis, or from the axes merged to one.
    exact   bitwise: data movement only.
    cost    a concat of one value per run of indices, at most `max_parts`. On M1 and M2, where a concat of slices of the
            last axis is reported to be wrong, two transposes, too.

    before
        %y: fp16[1, 5, 4] = gather(x=%x, indices=[4, 0, 1, 2, 3], axis=1)
    after
        %0: fp16[1, 4, 4], %1: fp16[1, 1, 4] = split(x=%x, split_sizes=[4, 1], axis=1)
        %y: fp16[1, 5, 4] = concat(values=(%1, %0), axis=1)
    """

    fixes = (ConstantGather,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    severity, confidence = Severity.SUGGESTION, "low"
    roots = GATHER_OPS
    evidence = (
        cite_m4_study(
            "by Core ML's estimates a gather moves 23 GB/s on the CPU (fitted to them), a slice 73 on the ANE",
            rows=True,
        ),
        Vendor(
            "contradicts it: gather resides on the ANE",
            source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py",
        ),
        cite_ane_compiler_quirk(
            "slices of the last axis that are joined return wrong elements on the M1 and M2 generations; "
            "transposing the axis away and back is correct on all"
        ),
    )

    always: bool = False
    "Concatenate values even if a chip of the target supports the gather."
    max_parts: int = 32
    "Maximum number of concatenated values."

    def match(self, op: Operation) -> Hit | Miss:
        if not is_const(op.indices):
            return Miss(op, "its indices are computed", near=False)
        if is_const(op.x):
            return Miss(op, "constant indices of a constant: fold_constant_gather folds them", near=False)
        plan = _plan_gather(op)
        if isinstance(plan, str):
            return Miss(op, plan)
        if plan.parts > self.max_parts:
            return Miss(op, f"{plan.parts} values to concatenate, above {self.max_parts}")
        if plan.parts > 1 and not self.always and not all(map(_BEFORE_M4.includes, self.generations)):
            return Miss(op, f"{plan.words()}: the gather is supported on M4; choose an older target, or always=true")
        aside = any(map(_LAST_AXIS_CONCAT_FAULT.includes, self.generations))
        return Hit(op, note=f"{op.op_type} at {op.indices.val.size} constant indices: {plan.words()}", plan=plan,
                   aside=aside)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return _build_gather_from_slices(mb, hit.op, hit.plan, hit.aside)

    def examples(self) -> Iterable[Example]:
        joined = partial(_make_gather_example, options={"always": True})
        yield joined("roll", [4, 0, 1, 2, 3])
        yield _make_gather_example("last element", -1, axis=-1, opset=ct.target.iOS15)
        yield _make_gather_example("every second", [[0, 2], [4, 6]], axis=2, x=(1, 5, 8))
        yield _make_gather_example("flip", [4, 3, 2, 1, 0])
        yield _make_gather_example("part of a flip", [4, 3, 2])
        yield joined("three of the last axis", [0, 2, 1], axis=2)
        yield joined("repeats", [0, 0, 1, 1, 2, 2])
        yield joined("shuffle", [0, 2, 4, 1, 3, 5], x=(2, 6, 4))
        yield joined("twice", [1, 3, 1, 3])
        row = np.stack(np.broadcast_arrays(np.zeros((1, 1, 1, 1)), np.arange(8).reshape(1, 1, 1, 8)), -1)
        yield make_example("a mask for each head", lambda x: Builder.gather_nd(
            x=x, indices=row.astype(np.uint16), name="y"), x=(1, 8))
        yield make_example("diagonal", lambda x: Builder.gather_nd(
            x=x, indices=np.repeat(np.arange(4), 2).reshape(4, 2).astype(np.int32), name="y"), x=(4, 4, 3))
        yield make_example("along an axis", lambda x: Builder.gather_along_axis(
            x=x, indices=np.array([3, 0], np.int32), axis=0, name="y"), options={"always": True}, x=(4,))
        yield _make_gather_example("scattered", [0, 5, 3, 2, 6], x=(1, 7, 4),
                                   options={"always": True, "max_parts": 4}, reason="5 values to concatenate, above 4")
        yield _make_gather_example("roll on M4", [4, 0, 1, 2, 3], reason=(
            "2 slices and a concat: the gather is supported on M4; choose an older target, or always=true"))
        yield _make_gather_example("outside", [0, 5], reason="index 5 is out of range for 5 elements")
        yield _make_gather_example("symbolic", [1, 2], x=(2, None, 4),
                                   reason="it reads from an axis of symbolic size")
        yield make_example("a row for each batch", lambda x: Builder.gather(
            x=x, indices=np.array([[0], [1]], np.int32), axis=1, batch_dims=1, name="y"),
            reason="its indices differ between batches", x=(2, 4))
        yield make_example("table", lambda x: Builder.add(
            x=x, y=Builder.gather(x=make_weight(4, 3), indices=np.array([1], np.int32), axis=0)),
            reason="constant indices of a constant: fold_constant_gather folds them", x=(2, 3))
        yield make_example("computed", lambda i: Builder.gather(x=make_weight(4, 3), indices=i, axis=0, name="y"),
                           reason="its indices are computed", dtype=types.int32, i=(2,))


def _plan_gather(op: Operation) -> _GatherPlan | str:
    """Plan the reads of `op`, whose indices are constant, or return why it cannot be replaced."""
    indices = np.asarray(op.indices.val).astype(np.int64)
    batch = int(get_const_value(op.inputs.get("batch_dims"), 0))
    if indices.size == 0:
        return "it reads no elements"
    if batch:
        shared = indices.reshape(-1, *indices.shape[batch:])
        if not np.array_equal(shared, np.broadcast_to(shared[:1], shared.shape)):
            return "its indices differ between batches"
        indices = shared[0]
    if op.op_type == "gather":
        plan = _plan_plain_gather(op, indices)
    elif op.op_type == "gather_along_axis":
        plan = _plan_gather_along_axis(op, indices)
    else:
        plan = _plan_gather_nd(op, indices, batch)
    return plan if isinstance(plan, str) else _validate_plan(op, plan)


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


def _plan_plain_gather(op: Operation, indices: _Array) -> _GatherPlan | str:
    axis = int(op.axis.val) % op.x.rank
    if is_symbolic(op.x.shape[axis]) and indices.size == 1 and (indices.min() >= 0 or not indices.ndim):
        return _GatherPlan(None, ((axis, Run(int(indices.reshape(-1)[0]), 1, 1)),))
    places = normalize_indices(indices, op.x.shape[axis])
    return places if isinstance(places, str) else _GatherPlan(None, ((axis, find_index_pattern(places)),))


def _plan_gather_along_axis(op: Operation, indices: _Array) -> _GatherPlan | str:
    axis = int(op.axis.val) % op.x.rank
    shape, places = get_static_shape(op.x), normalize_indices(indices, op.x.shape[axis])
    if isinstance(places, str):
        return places
    if shape is None:
        return "its other axes are symbolic, those of its indices are not"
    line = places[tuple(slice(None) if each == axis else slice(0, 1) for each in range(op.x.rank))]
    if np.array_equal(places, np.broadcast_to(line, places.shape)):
        return _GatherPlan(None, ((axis, find_index_pattern(line)),))
    grid: list[_Array] = list(np.indices(indices.shape))
    grid[axis] = places
    return _plan_flattened_gather(grid, shape, shape)


def _plan_flattened_gather(columns: list[_Array], extents: tuple[int, ...], shape: tuple[int, ...]) -> _GatherPlan:
    """Plan a gather of points: the axes that the indices run over are flattened to one."""
    places = np.ravel_multi_index(tuple(np.broadcast_arrays(*columns)), extents)
    return _GatherPlan((math.prod(extents), *shape[len(extents):]), ((0, find_index_pattern(places)),))


def _plan_gather_nd(op: Operation, indices: _Array, batch: int) -> _GatherPlan | str:
    columns = []
    axes = range(batch, batch + indices.shape[-1])
    for axis, column in zip(axes, np.moveaxis(indices, -1, 0)):
        places = normalize_indices(column, op.x.shape[axis])
        if isinstance(places, str):
            return places
        columns.append(places)
    apart = split_points_by_axis(columns)
    if apart is not None:
        return _GatherPlan(None, tuple((axis, find_index_pattern(line)) for axis, line in zip(axes, apart)))
    if batch or any(map(is_symbolic, op.x.shape)):
        return "its indices are not a product of indices per axis, and the axes before or after are not static"
    return _plan_flattened_gather(columns, tuple(op.x.shape[axis] for axis in axes), tuple(op.x.shape))


def _validate_plan(op: Operation, plan: _GatherPlan) -> _GatherPlan | str:
    """Return the plan without the axes that are read entirely, or why it cannot be built."""
    for _, places in plan.axis_patterns:
        reason = find_take_obstacle(op.x, places)
        if reason and plan.shape is None:
            return reason
    needs_reshape = plan.shape is not None or op.op_type == "gather_nd" or op.x.rank - op.outputs[0].rank not in (0, 1)
    reason = find_reshape_obstacle(op.outputs[0].shape) if needs_reshape else ""
    if reason:
        return reason
    shape = plan.shape or op.x.shape
    cut = tuple((axis, places) for axis, places in plan.axis_patterns if places != Run(0, 1, shape[axis]))
    return _GatherPlan(plan.shape, cut)


def _build_gather_from_slices(mb: RewriteBuilder, op: Operation, plan: _GatherPlan, aside: bool) -> Var:
    """Build the output of `op` from slices.

    With `aside`, several slices of a last axis are joined along another axis.
    """
    var, out = op.x, op.outputs[0]
    if plan.shape is not None:
        var = reshape_value(mb, var, plan.shape)
    straight = {axis: places for axis, places in plan.axis_patterns if isinstance(places, Run) and places.step > 0}
    is_one_slice = len(straight) == len(plan.axis_patterns) and all(run.count == 1 for run in straight.values())
    if straight and is_one_slice and var.rank - len(straight) == out.rank:
        return slice_runs(mb, var, straight, squeeze=True)
    var = slice_runs(mb, var, straight)
    for axis, places in plan.axis_patterns:
        if axis in straight:
            continue
        take = _take_last_axis_transposed if aside and axis == var.rank - 1 else take_indices
        var = take(mb, var, axis, places)
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
    rows = take_indices(mb, mb.transpose(x=var, perm=order), axis - 1, places)
    back: Var = mb.transpose(x=rows, perm=order)
    return back


def _make_gather_example(
    name: str,
    indices: Any,
    *,
    axis: int = 1,
    x: tuple[int | None, ...] = (1, 5, 4),
    opset: Any = ct.target.iOS17,
    reason: str | None = None,
    options: dict[str, Any] | None = None,
) -> Example:
    places = np.array(indices, np.int32)
    return make_example(name, lambda x: Builder.gather(x=x, indices=places, axis=axis, name="y"), reason=reason,
                        options=options, opset=opset, x=x)
