"""Replace a scatter with constant indices by a select, or by slices and a concat."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import (
    get_const_value,
    get_consumers,
    get_itemsize,
    get_static_shape,
    is_all_zero,
    is_const,
    is_symbolic,
)
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss, Vendor
from ...passes.evidence import cite_m1_gpt_notes, cite_m4_study
from ...passes.examples import make_example, make_weight
from ...rules.unsupported_ops import Scatter
from ._index_patterns import (
    Run,
    find_ascending_run,
    find_index_pattern,
    find_reshape_obstacle,
    reshape_value,
    slice_runs,
    take_indices,
)

_SCATTER_OPS = ("scatter", "scatter_nd", "scatter_along_axis")
_Array = np.ndarray[Any, Any]
_MAX_WINDOW_INDICES = 1 << 22
"""Maximum number of indices of a window that are enumerated.

Longer lists would need more time and memory than all other rules.
"""
_MAX_RANK = 5
"Most axes that are supported on the ANE."
_CombineFunction = Callable[[RewriteBuilder, Var, Var], Var]
_SELECT_DTYPES = (types.fp16, types.fp32, types.int32)
"Dtypes that a select accepts."
_COMBINE_OPS = {"add": "add", "sub": "sub", "mul": "mul", "div": "real_div", "max": "maximum", "min": "minimum"}


class ScatterAsSlices(BlockRewrite):
    """Replace a scatter with constant indices, such as a slice assignment, by a select, or by slices and a concat.

    why     scatter is unsupported on the ANE, and coremltools emits one for each `x[..., -1] += 1` for targets before
            iOS18: on all elements in one row, between two reshapes.
    when    scatter, scatter_nd and scatter_along_axis with constant, unique indices. One index of an axis, or a scalar
            update: a select with a constant mask. A window, evenly spaced along each axis, possibly only in the shape
            before a reshape: a concat of the update and the parts around it; an update of constant zeros: a pad. Other
            indices of one axis: a concat of at most `max_parts` pieces; a constant update of other indices: a select of
            at most `max_bytes`. With `windows` slice_update, too.
    exact   rounding for max and min, which may return either of two zeros; otherwise bitwise: elements are moved and
            combined once, as before.
    cost    a select or a concat over all of the data; the bytes of a mask, and of an update extended to all indices.

    before
        %0: fp16 = reduce_max(x=%x)
        %1: fp16[6] = mul(x=%0, y=[-0.6875, -0.25, 0.1875, 0.625, -0.375, 0.0625])
        %2: fp16[24] = reshape(x=%x, shape=[-1])
        %3: fp16[24] = scatter(data=%2, indices=[3, 7, 11, 15, 19, 23], updates=%1, mode=update)
        %y: fp16[2, 3, 4] = reshape(x=%3, shape=[-1, 3, 4])
    after
        %0: fp16 = reduce_max(x=%x)
        %1: fp16[6] = mul(x=%0, y=[-0.6875, -0.25, 0.1875, 0.625, -0.375, 0.0625])
        %2: fp16[2, 3, 1] = reshape(x=%1, shape=[2, 3, 1])
        %y: fp16[2, 3, 4] = select(cond=[[[False, False, False, True]]], a=%2, b=%x)
    """

    fixes = (Scatter,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "the same bits, except that max and min of two zeros may return the sign of either"
    preset = "full"
    confidence = "high"
    roots = (*_SCATTER_OPS, "slice_update")
    evidence = (
        Vendor("scatter falls off the ANE; an assignment to a window may reside there",
               source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"),
        cite_m4_study("scatter is unsupported; select, concat, pad and slices are accepted"),
        cite_m1_gpt_notes("a scatter into a key and value cache is not supported; where with a mask runs on the ANE"),
    )

    max_parts: int = 32
    "Maximum number of concatenated values."
    max_bytes: int = 1 << 20
    "Maximum bytes of new constants for one op: the mask, and an update extended to all indices."
    windows: bool = False
    "Rewrite slice_update at constant indices, too; no source reports whether it runs on the ANE."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type in _SCATTER_OPS or (op.op_type == "slice_update" and self.windows):
                yield self.match(op)

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type in _SCATTER_OPS and not is_const(op.indices):
            return Miss(op, "its indices are computed", near=False)
        plan = _plan_scatter(op, self.max_parts, self.max_bytes)
        if isinstance(plan, str):
            return Miss(op, plan)
        exactness = None if plan.group.mode in ("max", "min") else Exactness.BITWISE
        return Hit(op, note=f"{op.op_type} to {len(plan.group.places)} constant indices: {plan.words}",
                   exactness=exactness, plan=plan)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return _build_scatter_plan(mb, hit.op, hit.plan)

    def examples(self) -> Iterable[Example]:
        last = np.arange(3, 24, 4)
        yield make_example("the last of each row", partial(_build_flat_scatter, places=last), x=(2, 3, 4))
        yield make_example("added to the last of each row", partial(_build_flat_scatter, places=last, mode="add"),
                           x=(2, 3, 4))
        yield _make_row_example("columns", [1, 2], axis=1)
        yield _make_row_example("rows, added", [1, 2], mode="add")
        yield _make_row_example("every second column", [0, 2, 4], axis=1, mode="max")
        yield _make_row_example("any rows", [3, 0, 1], mode="min", opset=ct.target.iOS15)
        yield _make_constant_example("constants to several places", [4, 1, 2], make_weight(3, 8), x=(5, 8))
        yield _make_constant_example("a number", [1, -1], np.zeros(2, np.float16), x=(5,), opset=ct.target.iOS15)
        yield _make_constant_example("points", [[1, 2], [1, 3], [2, 2], [2, 3]], make_weight(4), "scatter_nd", "mul")
        yield _make_constant_example("constant points", [[1, 2], [3, 0], [2, 4]], make_weight(3), "scatter_nd", "sub",
                                     options={"max_parts": 3})
        yield _make_constant_example("along an axis", [[1], [1], [1], [1]], make_weight(4, 1), "scatter_along_axis",
                                     axis=1)
        yield make_example("into zeros", lambda x: Builder.scatter(
            data=np.zeros(5, np.float16), indices=np.array([1, 2], np.int32), mode="update",
            updates=Builder.mul(x=Builder.reduce_max(x=x), y=make_weight(2)), name="y"), x=(3,))
        yield make_example("slice_update", _build_slice_update, options={"windows": True}, opset=ct.target.iOS18,
                           x=(4, 5))
        yield make_example("slice_update, as it is", _build_slice_update, reason="", opset=ct.target.iOS18, x=(4, 5))
        yield _make_row_example("twice", [1, 1],
                                reason="it writes an index twice, and the result is undefined")
        yield _make_row_example("added twice to a row", [1, 1], mode="add",
                                reason="it combines several values at one index (mode 'add'), where slices combine one")
        yield _make_row_example("many", [0, 2, 3], mode="add", options={"max_parts": 2},
                                reason="5 values to concatenate, above 2")
        yield make_example("integers", lambda x, v: Builder.scatter(
            data=x, indices=np.array([1], np.int32), updates=v, axis=0, mode="add"),
            reason="it computes on integers", dtype=types.int32, x=(3,), v=(1,))
        yield make_example("computed", lambda i: Builder.scatter(
            data=make_weight(4), indices=i, updates=make_weight(1), axis=0, name="y"),
            reason="its indices are computed", dtype=types.int32, i=(1,))


def _plan_scatter(op: Operation, max_parts: int, max_bytes: int) -> _ScatterPlan | str:
    """Plan how to write `op` without a scatter, or return why that is impossible."""
    group = _read_scatter_target(op)
    if isinstance(group, str):
        return group
    data, new = _get_data_and_update(op)
    if group.mode != "update" and not types.is_float(data.dtype):
        return "it computes on integers"
    if _count_elements(new.shape) != _count_elements(group.shape(data, (len(group.places),))):
        return "the shapes of its update and its indices differ"
    plan = _plan_window(data, new, group, max_bytes)
    if isinstance(plan, _ScatterPlan):
        return plan
    segments = _split_into_segments(group.places, group.size)
    count = len(segments) + (0 if group.mode == "update" else find_index_pattern(group.places).parts)
    obstacle = find_reshape_obstacle(group.shape(data, (group.size,))) if len(group.extents) > 1 else ""
    if count <= max_parts and not obstacle:
        return _ScatterPlan(group, (group.size,), None, "pieces", f"{len(segments)} pieces")
    shape = get_static_shape(data)
    if shape is not None and is_const(new) and data.dtype in _SELECT_DTYPES:
        size = math.prod(shape) * get_itemsize(data) + group.size
        if size <= max_bytes:
            return _ScatterPlan(group, (group.size,), None, "spread", f"a select of a constant, {size} bytes")
        return f"{count} values to concatenate, above {max_parts}, and {size} bytes for a select, above {max_bytes}"
    return plan or obstacle or f"{count} values to concatenate, above {max_parts}"


@dataclass(frozen=True)
class _ScatterPlan:
    """The form of a scatter to `group`, reshaped to `inner`: a window of `runs`, or (None) indices of one axis."""

    group: _ScatterTarget
    inner: tuple[int, ...]
    runs: dict[int, Run] | None
    form: str
    words: str


@dataclass(frozen=True)
class _ScatterTarget:
    """The flat indices `places` that a scatter writes, row by row over the neighbouring axes from `first` on.

    `extents` are the extents of these axes.
    """

    first: int
    extents: tuple[int, ...]
    places: _Array
    mode: str = "update"

    @property
    def size(self) -> int:
        return math.prod(self.extents)

    def shape(self, data: Var, inner: tuple[int, ...]) -> list[Any]:
        """Return the shape of `data` with `inner` in place of the axes of the group."""
        return [*data.shape[:self.first], *inner, *data.shape[self.first + len(self.extents):]]


def _read_scatter_target(op: Operation) -> _ScatterTarget | str:
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
            return "its other axes are symbolic, those of its indices are not"
        if np.array_equal(indices, np.broadcast_to(line, indices.shape)):
            columns = [line]
        else:
            axes, columns = range(data.rank), list(np.indices(indices.shape))
            columns[axis] = indices
    extents = tuple(data.shape[axis] for axis in axes)
    if any(map(is_symbolic, extents)):
        return "it writes to an axis of symbolic size"
    if any(np.any((column < -extent) | (column >= extent)) for column, extent in zip(columns, extents)):
        return "an index is out of range"
    columns = [np.where(column < 0, column + extent, column) for column, extent in zip(columns, extents)]
    places = np.ravel_multi_index(tuple(np.broadcast_arrays(*columns)), extents).reshape(-1)
    return _check_unique_indices(_ScatterTarget(axes[0], extents, places, mode))


def _read_slice_update(op: Operation) -> _ScatterTarget | str:
    rank, shape = op.x.rank, get_static_shape(op.x)
    begin, end = get_const_value(op.begin), get_const_value(op.end)
    if shape is None or begin is None or end is None:
        return "its window is computed, or its shape symbolic"
    stride = get_const_value(op.stride) or [1] * rank
    from_front, to_end, squeezed = (get_const_value(op.inputs.get(name)) or [False] * rank
                                    for name in ("begin_mask", "end_mask", "squeeze_mask"))
    lines: list[range] = []
    for axis, extent in enumerate(shape):
        if squeezed[axis]:
            if not -extent <= begin[axis] < extent:
                return "an index is out of range"
            index = int(begin[axis]) % extent
            lines.append(range(index, index + 1))
        else:
            first = None if from_front[axis] else int(begin[axis])
            last = None if to_end[axis] else int(end[axis])
            lines.append(range(extent)[first:last:int(stride[axis])])
    cut = [axis for axis, extent in enumerate(shape) if lines[axis] != range(extent)] or [0]
    axes = slice(cut[0], cut[-1] + 1)  # other axes are written entirely: their indices are not listed
    count = math.prod(map(len, lines[axes]))
    if count > _MAX_WINDOW_INDICES:
        return f"its window has {count} indices, above {_MAX_WINDOW_INDICES}"
    lists = [np.arange(line.start, line.stop, line.step) for line in lines[axes]]
    places = np.ravel_multi_index(np.ix_(*lists), shape[axes]).reshape(-1)
    return _check_unique_indices(_ScatterTarget(cut[0], shape[axes], places))


def _check_unique_indices(group: _ScatterTarget) -> _ScatterTarget | str:
    if not len(group.places):
        return "it writes nothing"
    if len(np.unique(group.places)) < len(group.places):
        return ("it writes an index twice, and the result is undefined" if group.mode == "update" else
                f"it combines several values at one index (mode '{group.mode}'), where slices combine one")
    return group


def _get_data_and_update(op: Operation) -> tuple[Var, Var]:
    return (op.x, op.update) if op.op_type == "slice_update" else (op.data, op.updates)


def _count_elements(shape: Sequence[Any]) -> tuple[int, int]:
    """Return the number of elements along the axes of known size, and the number of other axes."""
    known = [int(extent) for extent in shape if not is_symbolic(extent)]
    return math.prod(known), len(shape) - len(known)


def _plan_window(data: Var, new: Var, group: _ScatterTarget, max_bytes: int) -> _ScatterPlan | str:
    """Plan the cheapest window: by a select, else a contiguous window, else a strided one; or return why not."""
    reason, found = "", list[_ScatterPlan]()
    for inner, all_runs in _iterate_window_shapes(group, _find_shape_before_reshape(data)):
        shape = group.shape(data, inner)
        runs = {group.first + axis: run for axis, run in enumerate(all_runs) if run != Run(0, 1, inner[axis])}
        mask = math.prod(int(shape[axis]) for axis in runs)
        single = all(run.count == 1 for run in runs.values())
        if inner != group.extents and (len(shape) > _MAX_RANK or find_reshape_obstacle(shape)):
            continue
        is_selectable = data.dtype in _SELECT_DTYPES and (single or _read_uniform_value(new) is not None)
        if runs and is_selectable and mask <= max_bytes:
            return _ScatterPlan(group, inner, runs, "select", "a select with a constant mask")
        reason = _find_window_obstacle(shape, runs)
        if not reason:
            words = f"a window of {_format_axis_count(len(runs))}" if runs else "all of it"
            found.append(_ScatterPlan(group, inner, runs, "window", words))
    found.sort(key=lambda plan: any(run.step > 1 for run in (plan.runs or {}).values()))
    return found[0] if found else reason


def _iterate_window_shapes(
    group: _ScatterTarget, known: tuple[int, ...] | None
) -> Iterator[tuple[tuple[int, ...], list[Run]]]:
    """Yield shapes of the group in which its indices are a window, evenly spaced along each axis; the simplest first.

    `known` is a shape that the group had before it was reshaped to one axis.
    """
    for shape in dict.fromkeys((group.extents, known, _infer_window_shape(group.places, group.size))):
        lists = _split_indices_by_axis(group.places, shape) if shape else None
        runs = [find_ascending_run(line) for line in lists or ()]
        if shape and runs and None not in runs:
            yield shape, [run for run in runs if run is not None]


def _infer_window_shape(places: _Array, extent: int) -> tuple[int, ...] | None:
    """Infer a shape of `extent` elements in which nested, evenly spaced `places` are a window; None if not found."""
    strides: list[int] = []
    line = places
    while len(line) > 1:
        jumps = np.diff(line)
        step = int(jumps[0])
        count = int(np.argmax(jumps != step)) + 1 if np.any(jumps != step) else len(line)
        if step <= 0 or len(line) % count:
            return None
        offsets = line.reshape(-1, count) - line[::count, None]
        if np.any(offsets != np.arange(count) * step):  # the rows are not spaced alike
            return None
        strides.append(step)
        line = line[::count]
    extents = [extent, *reversed(strides)]
    if any(outer % inner for outer, inner in pairwise(extents)):
        return None
    shape = tuple(outer // inner for outer, inner in pairwise(extents))
    return (*shape, extents[-1]) if extents[-1] > 1 and strides else shape or None


def _split_indices_by_axis(places: _Array, shape: tuple[int, ...]) -> list[_Array] | None:
    """Split flat `places` in `shape` into one list for each axis; None unless they are all combinations, in order."""
    points = np.unravel_index(places, shape)
    counts = [len(np.unique(line)) for line in points]
    if math.prod(counts) != len(places):
        return None
    lists = [np.moveaxis(line.reshape(counts), axis, 0).reshape(counts[axis], -1)[:, 0]
             for axis, line in enumerate(points)]
    combinations = np.ravel_multi_index(np.ix_(*lists), shape).reshape(-1)
    return lists if np.array_equal(combinations, places) else None


def _find_shape_before_reshape(data: Var) -> tuple[int, ...] | None:
    """Return the shape of a one-axis value before its reshape, or None."""
    if data.rank != 1 or data.op is None or data.op.op_type != "reshape":
        return None
    return get_static_shape(data.op.x)


def _read_uniform_value(new: Var) -> Any:
    """Return the one number in the constant `new`, None where it is not a constant or has different elements."""
    if not is_const(new):
        return None
    values = np.asarray(new.val).reshape(-1)
    same = values.view(f"u{values.itemsize}") == values[:1].view(f"u{values.itemsize}")
    return values[0] if np.all(same) else None


def _find_window_obstacle(shape: Sequence[Any], runs: dict[int, Run]) -> str:
    """Return why `_write_window` cannot write a window into a value of `shape`, "" where it can."""
    strided = [run for run in runs.values() if run.step > 1]
    if strided and len(shape) >= _MAX_RANK:
        return f"it writes indices with step {strided[0].step} into a value of rank {_MAX_RANK}"
    return find_reshape_obstacle(shape) if strided else ""


def _format_axis_count(count: int) -> str:
    return "one axis" if count == 1 else f"{count} axes"


def _split_into_segments(places: _Array, extent: int) -> list[tuple[bool, int, int]]:
    """Split an axis whose `places` are written into contiguous segments: (new, first index in its value, count).

    Memory is used for `places` only, as the axis may be longer than any memory.
    """
    order = np.argsort(places)
    ascending = places[order]
    breaks = np.flatnonzero((np.diff(ascending) != 1) | (np.diff(order) != 1)) + 1
    found: list[tuple[bool, int, int]] = []
    at = 0
    for first, last in pairwise([0, *breaks.tolist(), len(ascending)]):
        start, count = int(ascending[first]), last - first
        if start > at:
            found.append((False, at, start - at))
        found.append((True, int(order[first]), count))
        at = start + count
    return [*found, (False, at, extent - at)] if at < extent else found


def _build_scatter_plan(mb: RewriteBuilder, op: Operation, plan: _ScatterPlan) -> dict[Var, Var]:
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


def _build_result(mb: RewriteBuilder, data: Var, new: Var, plan: _ScatterPlan) -> Var:
    group, combine = plan.group, _make_combiner(plan.group.mode)
    if plan.form == "pieces":
        fresh = _reshape_at_source(mb, new, _replace_extents(data, {group.first: len(group.places)}))
        return _write_segments(mb, data, group.first, group.places, fresh, combine, group.mode == "update")
    if plan.runs is None:
        mask = np.zeros(group.size, bool)
        mask[group.places] = True
        wide = mask.reshape([-1 if axis == group.first else 1 for axis in range(data.rank)])
        return _select_by_mask(mb, data, wide, _scatter_const_update(mb, data, new, group), combine)
    number = _read_uniform_value(new) if plan.form == "select" else None
    if number is not None:
        return _select_by_mask(mb, data, _make_window_mask(data, plan.runs), number, combine)
    fresh = _reshape_at_source(mb, new, _replace_extents(data, {axis: run.count for axis, run in plan.runs.items()}))
    if plan.form == "select":
        return _select_by_mask(mb, data, _make_window_mask(data, plan.runs), fresh, combine)
    padded = _pad_update_with_zeros(mb, data, plan.runs, fresh) if group.mode == "update" else None
    return _write_window(mb, data, plan.runs, fresh, combine) if padded is None else padded


def _make_combiner(mode: str) -> _CombineFunction:
    """Return a function that combines the old value and the new one as a scatter of `mode` does."""
    def combine_rows(mb: RewriteBuilder, old: Var, new: Var) -> Var:
        made: Var = new if mode == "update" else getattr(mb, _COMBINE_OPS[mode])(x=old, y=new)
        return made

    return combine_rows


def _reshape_at_source(mb: RewriteBuilder, var: Var, shape: Sequence[Any]) -> Var:
    """Reshape `var` to `shape`: view a constant's bytes, and use the input of an earlier reshape."""
    if list(var.shape) == list(shape):
        return var
    if is_const(var):
        return mb.reshaped(var, tuple(int(extent) for extent in shape))
    if var.op is not None and var.op.op_type == "reshape" and get_static_shape(var.op.x) is not None:
        return reshape_value(mb, var.op.x, shape)
    return reshape_value(mb, var, shape)


def _replace_extents(data: Var, counts: dict[int, int]) -> list[Any]:
    return [counts.get(axis, extent) for axis, extent in enumerate(data.shape)]


def _write_segments(
    mb: RewriteBuilder, var: Var, axis: int, places: _Array, new: Var, combine: _CombineFunction, plain: bool
) -> Var:
    """Write any indices of one axis, in any order, as `_write_window`; with `plain` the old elements are unused."""
    extent = int(var.shape[axis])
    made = new if plain else combine(mb, take_indices(mb, var, axis, find_index_pattern(places)), new)
    parts = _split_into_segments(places, extent)
    old = sorted((first, count) for fresh, first, count in parts if not fresh)
    fresh = sorted((first, count) for is_new, first, count in parts if is_new)
    old_values = _slice_segments(mb, var, axis, old, extent)
    new_values = _slice_segments(mb, made, axis, fresh, len(places))
    values = [(new_values if is_new else old_values)[first] for is_new, first, _ in parts]
    return _concat_parts(mb, values, axis)


def _slice_segments(
    mb: RewriteBuilder, var: Var, axis: int, wanted: list[tuple[int, int]], extent: int
) -> dict[int, Any]:
    """Return the wanted segments of an axis by their first index."""
    ends = sorted({0, extent, *(first for first, _ in wanted), *(first + count for first, count in wanted)})
    if not wanted or is_symbolic(var.shape[axis]):
        return {}
    parts = _split_axis(mb, var, axis, [after - before for before, after in pairwise(ends)])
    return dict(zip(ends, parts))


def _split_axis(mb: RewriteBuilder, var: Var, axis: int, sizes: list[int]) -> list[Any]:
    """Split an axis of `var` into parts, None for those of size 0."""
    if sum(size > 0 for size in sizes) == 1:
        return [var if size else None for size in sizes]
    if var.dtype in (*_SELECT_DTYPES, types.bool):
        parts = iter(mb.split(x=var, split_sizes=[size for size in sizes if size], axis=axis))
        return [next(parts) if size else None for size in sizes]
    ends = [0, *np.cumsum(sizes).tolist()]
    return [
        slice_runs(mb, var, {axis: Run(start, 1, end - start)}) if end > start else None
        for start, end in pairwise(ends)
    ]


def _concat_parts(mb: RewriteBuilder, parts: list[Any], axis: int) -> Var:
    values = [part for part in parts if part is not None]
    joined: Var = values[0] if len(values) == 1 else mb.concat(values=values, axis=axis)
    return joined


def _select_by_mask(mb: RewriteBuilder, var: Var, mask: _Array, new: Any, combine: _CombineFunction) -> Var:
    """Combine `new` into `var` where the constant `mask` is true; both may have extent 1 on axes of equal elements."""
    key = ("mask", mask.shape, mask.tobytes())
    cond = mb.once(key, lambda: _build_mask_const(mb, mask))
    made: Var = mb.select(cond=cond, a=combine(mb, var, new), b=var)
    return made


def _build_mask_const(mb: RewriteBuilder, array: _Array) -> Var:
    with mb.at(mb.block.operations[0], "places"):
        made: Var = mb.const(val=array, name="places_mask")
    return made


def _scatter_const_update(mb: RewriteBuilder, data: Var, new: Var, group: _ScatterTarget) -> Var:
    """Build a constant update with zeros at the indices that it does not write."""
    def make_update() -> _Array:
        update = np.asarray(new.val).reshape(_replace_extents(data, {group.first: len(group.places)}))
        spread = np.zeros(tuple(data.shape), update.dtype)
        spread[(slice(None),) * group.first + (group.places,)] = update
        return spread

    return mb.weight(new, f"over_{group.size}_{hashlib.sha256(group.places.tobytes()).hexdigest()[:16]}", make_update)


def _make_window_mask(data: Var, runs: dict[int, Run]) -> _Array:
    mask = np.zeros([int(extent) if axis in runs else 1 for axis, extent in enumerate(data.shape)], bool)
    chosen: list[Any] = [
        np.arange(run.start, run.start + run.count * run.step, run.step) if (run := runs.get(axis)) else [0]
        for axis in range(data.rank)]
    mask[np.ix_(*chosen)] = True
    return mask


def _pad_update_with_zeros(mb: RewriteBuilder, var: Var, runs: dict[int, Run], new: Var) -> Var | None:
    """Write an update into a constant of zeros by padding `new` with zeros.

    Return None where `var` is not all +0.0, where a run has gaps, or where there is nothing to pad.
    """
    if not is_all_zero(var) or np.any(np.signbit(var.val)) or any(run.step > 1 for run in runs.values()):
        return None
    amounts = [0] * (2 * var.rank)
    for axis, run in runs.items():
        amounts[2 * axis:2 * axis + 2] = run.start, int(var.shape[axis]) - run.start - run.count
    padded: Var = mb.pad(x=new, pad=amounts, **_make_zero_pad_options(new)) if any(amounts) else None
    return padded


def _make_zero_pad_options(var: Var) -> dict[str, Any]:
    return {"mode": "constant", "constant_val": types.nptype_from_builtin(var.dtype)(0)}


def _write_window(mb: RewriteBuilder, var: Var, runs: dict[int, Run], new: Var, combine: _CombineFunction) -> Var:
    """Combine `new` into a window of `var`, a run of each of some axes; the elements outside of it do not change."""
    left = {axis: run for axis, run in runs.items() if run != Run(0, 1, var.shape[axis])}
    if not left:
        return combine(mb, var, new)
    axis, run = next(iter(left.items()))
    inner = {each: left[each] for each in left if each != axis}
    extent, long = int(var.shape[axis]), run.count * run.step
    first = run.start if run.step == 1 else max(0, min(run.start, extent - long))
    if long > extent:
        wide = mb.pad(x=var, pad=_make_pad_amounts(var.rank, axis, 0, long - extent), **_make_zero_pad_options(var))
        return slice_runs(mb, _write_window(mb, wide, runs, new, combine), {axis: Run(0, 1, extent)})
    sizes = [first, long, extent - first - long]
    parts = _split_axis(mb, var, axis, sizes)
    if run.step == 1:
        parts[1] = _write_window(mb, parts[1], inner, new, combine)
    else:
        shifted = Run(run.start - first, run.step, run.count)
        parts[1] = _write_strided_window(mb, parts[1], axis, shifted, inner, new, combine)
    return _concat_parts(mb, parts, axis)


def _make_pad_amounts(rank: int, axis: int, before: int, after: int) -> list[int]:
    amounts = [0] * (2 * rank)
    amounts[2 * axis:2 * axis + 2] = before, after
    return amounts


def _write_strided_window(
    mb: RewriteBuilder, var: Var, axis: int, run: Run, inner: dict[int, Run], new: Var, combine: _CombineFunction,
) -> Var:
    """Write a run of every `step`-th element of an entire axis, by splitting the axis in two."""
    shape = list(var.shape)
    grid = reshape_value(mb, var, [*shape[:axis], run.count, run.step, *shape[axis + 1:]])
    parts = _split_axis(mb, grid, axis + 1, [run.start, 1, run.step - run.start - 1])
    written = _write_window(mb, mb.squeeze(x=parts[1], axes=[axis + 1]), inner, new, combine)
    parts[1] = mb.expand_dims(x=written, axes=[axis + 1])
    return reshape_value(mb, _concat_parts(mb, parts, axis + 1), shape)


def _build_flat_scatter(x: Var, places: Any, mode: str = "update") -> Var:
    """Build an assignment to a slice as coremltools converts it: a scatter to all elements in one row."""
    updates = Builder.mul(x=Builder.reduce_max(x=x), y=make_weight(len(places)))
    line = Builder.reshape(x=x, shape=[-1])
    line = Builder.scatter(data=line, indices=np.array(places, np.int32), updates=updates, mode=mode)
    result: Var = Builder.reshape(x=line, shape=[-1, *x.shape[1:]], name="y")
    return result


def _make_row_example(name: str, places: list[int], *, axis: int = 0, mode: str = "update", **expected: Any) -> Example:
    """Make an example of a scatter of computed rows or columns."""

    def build_body(x: Var) -> Var:
        size = [-1, -1]
        size[axis] = len(places)
        updates = Builder.relu(x=Builder.slice_by_size(x=x, begin=[0, 0], size=size))
        result: Var = Builder.scatter(data=x, indices=np.array(places, np.int32), updates=updates, axis=axis, mode=mode,
                                      name="y")
        return result

    return make_example(name, build_body, x=(4, 5), **expected)


def _make_constant_example(
    name: str,
    indices: Any,
    updates: _Array,
    op_type: str = "scatter",
    mode: str = "update",
    *,
    axis: int = 0,
    x: tuple[int, ...] = (4, 5),
    **expected: Any,
) -> Example:
    """Make an example of a scatter of constants."""
    parameters = {} if op_type == "scatter_nd" else {"axis": axis}

    def build_body(x: Var) -> Var:
        result: Var = getattr(Builder, op_type)(data=x, indices=np.array(indices, np.int32), updates=updates, mode=mode,
                                                name="y", **parameters)
        return result

    return make_example(name, build_body, x=x, **expected)


def _build_slice_update(x: Var) -> Var:
    update = Builder.slice_by_size(x=x, begin=[0, 0], size=[2, -1])
    result: Var = Builder.slice_update(x=x, update=update, begin=[1, 0], end=[3, 0], end_mask=[False, True], name="y")
    return result
