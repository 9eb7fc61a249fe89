"""Writes of new elements at constant indices: by a select, by pads, or by a split and a concat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_all_zero, is_const, is_symbolic
from ._index_patterns import Run, find_index_pattern
from ._indexed_reads import find_reshape_obstacle, reshape_value, slice_runs, take_indices

__all__ = [
    "SELECT_DTYPES",
    "CombineFunction",
    "find_window_obstacle",
    "make_combiner",
    "pad_update_with_zeros",
    "read_uniform_value",
    "select_by_mask",
    "split_into_segments",
    "write_segments",
    "write_window",
]

CombineFunction = Callable[[RewriteBuilder, Var, Var], Var]
SELECT_DTYPES = (types.fp16, types.fp32, types.int32)
"Dtypes that a select accepts."
_MAX_RANK = 5
"Most axes that are supported on the ANE."
_COMBINE_OPS = {"add": "add", "sub": "sub", "mul": "mul", "div": "real_div", "max": "maximum", "min": "minimum"}


def make_combiner(mode: str) -> CombineFunction:
    """Return a function that combines the old value and the new one as a scatter of `mode` does."""
    def combine(mb: RewriteBuilder, old: Var, new: Var) -> Var:
        made: Var = new if mode == "update" else getattr(mb, _COMBINE_OPS[mode])(x=old, y=new)
        return made

    return combine


def find_window_obstacle(shape: Sequence[Any], runs: dict[int, Run]) -> str:
    """Return why `write_window` cannot write a window into a value of `shape`, "" where it can."""
    strided = [run for run in runs.values() if run.step > 1]
    if strided and len(shape) >= _MAX_RANK:
        return f"it writes places that are {strided[0].step} apart into a value of rank {_MAX_RANK}"
    return find_reshape_obstacle(shape) if strided else ""


def write_window(mb: RewriteBuilder, var: Var, runs: dict[int, Run], new: Var, combine: CombineFunction) -> Var:
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
        return slice_runs(mb, write_window(mb, wide, runs, new, combine), {axis: Run(0, 1, extent)})
    sizes = [first, long, extent - first - long]
    parts = _split_axis(mb, var, axis, sizes)
    if run.step == 1:
        parts[1] = write_window(mb, parts[1], inner, new, combine)
    else:
        parts[1] = _write_strided_window(
            mb, parts[1], axis, Run(run.start - first, run.step, run.count), inner, new, combine
        )
    return _concat_parts(mb, parts, axis)


def _write_strided_window(
    mb: RewriteBuilder, var: Var, axis: int, run: Run, inner: dict[int, Run], new: Var, combine: CombineFunction,
) -> Var:
    """Write a run of every `step`-th element of an entire axis, by splitting the axis in two."""
    shape = list(var.shape)
    grid = reshape_value(mb, var, [*shape[:axis], run.count, run.step, *shape[axis + 1:]])
    parts = _split_axis(mb, grid, axis + 1, [run.start, 1, run.step - run.start - 1])
    taken = write_window(mb, mb.squeeze(x=parts[1], axes=[axis + 1]), inner, new, combine)
    parts[1] = mb.expand_dims(x=taken, axes=[axis + 1])
    return reshape_value(mb, _concat_parts(mb, parts, axis + 1), shape)


def _split_axis(mb: RewriteBuilder, var: Var, axis: int, sizes: list[int]) -> list[Any]:
    """Split an axis of `var` into parts, None for those of size 0."""
    if sum(size > 0 for size in sizes) == 1:
        return [var if size else None for size in sizes]
    if var.dtype in (*SELECT_DTYPES, types.bool):
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


def _make_pad_amounts(rank: int, axis: int, before: int, after: int) -> list[int]:
    amounts = [0] * (2 * rank)
    amounts[2 * axis:2 * axis + 2] = before, after
    return amounts


def _make_zero_pad_options(var: Var) -> dict[str, Any]:
    return {"mode": "constant", "constant_val": types.nptype_from_builtin(var.dtype)(0)}


def pad_update_with_zeros(mb: RewriteBuilder, var: Var, runs: dict[int, Run], new: Var) -> Var | None:
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


def read_uniform_value(new: Var) -> Any:
    """Return the one number in the constant `new`, None where it is not a constant or has different elements."""
    if not is_const(new):
        return None
    values = np.asarray(new.val).reshape(-1)
    same = values.view(f"u{values.itemsize}") == values[:1].view(f"u{values.itemsize}")
    return values[0] if np.all(same) else None


def select_by_mask(mb: RewriteBuilder, var: Var, mask: np.ndarray[Any, Any], new: Any, combine: CombineFunction) -> Var:
    """Combine `new` into `var` where the constant `mask` is true; both may have extent 1 on axes of equal elements."""
    key = ("mask", mask.shape, mask.tobytes())
    cond = mb.once(key, lambda: _build_mask_const(mb, mask))
    made: Var = mb.select(cond=cond, a=combine(mb, var, new), b=var)
    return made


def _build_mask_const(mb: RewriteBuilder, array: np.ndarray[Any, Any]) -> Var:
    with mb.at(mb.block.operations[0], "places"):
        made: Var = mb.const(val=array, name="places_mask")
    return made


def split_into_segments(places: np.ndarray[Any, Any], extent: int) -> list[tuple[bool, int, int]]:
    """Split an axis whose `places` are written into contiguous segments: (new, first index in its value, count).

    Memory is used for `places` only, as the axis may be longer than any memory.
    """
    order = np.argsort(places)
    there = places[order]
    breaks = np.flatnonzero((np.diff(there) != 1) | (np.diff(order) != 1)) + 1
    found: list[tuple[bool, int, int]] = []
    at = 0
    for first, last in pairwise([0, *breaks.tolist(), len(there)]):
        start, count = int(there[first]), last - first
        if start > at:
            found.append((False, at, start - at))
        found.append((True, int(order[first]), count))
        at = start + count
    return [*found, (False, at, extent - at)] if at < extent else found


def write_segments(
    mb: RewriteBuilder,
    var: Var,
    axis: int,
    places: np.ndarray[Any, Any],
    new: Var,
    combine: CombineFunction,
    plain: bool,
) -> Var:
    """Write any indices of one axis, in any order, as `write_window`; `plain` where the old elements are not needed."""
    extent = int(var.shape[axis])
    made = new if plain else combine(mb, take_indices(mb, var, axis, find_index_pattern(places)), new)
    parts = split_into_segments(places, extent)
    old = sorted((first, count) for fresh, first, count in parts if not fresh)
    fresh = sorted((first, count) for is_new, first, count in parts if is_new)
    kept = _slice_segments(mb, var, axis, old, extent)
    given = _slice_segments(mb, made, axis, fresh, len(places))
    values = [(given if is_new else kept)[first] for is_new, first, _ in parts]
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
