"""Slices with constant parameters, and the same slice of a value with permuted axes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value

__all__ = [
    "SLICE_OPS",
    "find_swap_axis",
    "has_offset",
    "read_slice_start",
    "slice_as_column",
    "slice_with_swapped_axes",
]

SLICE_OPS = ("slice_by_index", "slice_by_size", "split")
_NEUTRAL_PARAMETERS: dict[str, Any] = {
    "begin": 0, "end": 1, "stride": 1, "size": 1, "begin_mask": False, "end_mask": False, "squeeze_mask": False,
}
"Per-axis parameters, with the value that selects all of an axis of one element."


class _SliceStart(NamedTuple):
    """The first index and the stride of a slice on each axis."""

    begin: list[int]
    stride: list[int]


def read_slice_start(op: Operation) -> _SliceStart | None:
    """Return where `op` begins on each axis; None where that is dynamic.

    A split counts as beginning inside its axis.
    """
    rank = op.x.rank
    if op.op_type == "split":
        axis = int(op.axis.val) % rank
        return _SliceStart([int(number == axis) for number in range(rank)], [1] * rank)
    begin, end = get_const_value(op.begin), get_const_value(op.end if op.op_type == "slice_by_index" else op.size)
    if begin is None or end is None:
        return None
    if op.op_type == "slice_by_size":
        return _SliceStart(begin, [1] * rank)
    masked = get_const_value(op.begin_mask) or [False] * rank
    squeezed = get_const_value(op.squeeze_mask) or [False] * rank
    begin = [0 if free and not dropped else first for first, free, dropped in zip(begin, masked, squeezed)]
    return _SliceStart(begin, get_const_value(op.stride) or [1] * rank)


def has_offset(taken: _SliceStart, axis: int) -> bool:
    """Return whether the slice does not begin at the front of `axis`; a backward slice begins at the end."""
    return bool(taken.begin[axis] != 0 or taken.stride[axis] < 0)


def find_swap_axis(taken: _SliceStart, rank: int) -> int | None:
    """Return the axis nearest to the last that is read from its front; 0 for a vector, which becomes a column."""
    if rank == 1:
        return 0
    return next((axis for axis in reversed(range(rank - 1)) if not has_offset(taken, axis)), None)


def slice_with_swapped_axes(mb: RewriteBuilder, op: Operation, axis: int) -> Var | list[Var]:
    """Compute the outputs of `op` with the last axis and `axis` swapped."""
    rank = op.x.rank
    order = list(range(rank))
    order[axis], order[-1] = rank - 1, axis
    inputs = {name: var for name, var in op.inputs.items() if var is not None}
    inputs["x"] = mb.transpose(x=op.x, perm=order)
    if op.op_type == "split":
        parts = mb.split(**{**inputs, "axis": axis})
        return [mb.transpose(x=part, perm=order) for part in parts]
    for name in _NEUTRAL_PARAMETERS:
        if name in inputs:
            given = get_const_value(inputs[name])
            inputs[name] = [given[number] for number in order]
    taken = getattr(mb, op.op_type)(**inputs)
    dropped = inputs.get("squeeze_mask") or [False] * rank
    left = [number for number, gone in zip(order, dropped) if not gone]
    back = [int(place) for place in np.argsort(left)]
    return taken if back == sorted(back) else mb.transpose(x=taken, perm=back)


def slice_as_column(mb: RewriteBuilder, op: Operation) -> Var | list[Var]:
    """Compute the outputs of `op`, which slices a vector, on a column."""
    inputs = {name: var for name, var in op.inputs.items() if var is not None}
    inputs["x"] = mb.expand_dims(x=op.x, axes=[1])
    if op.op_type == "split":
        return [mb.squeeze(x=part, axes=[1]) for part in mb.split(**{**inputs, "axis": 0})]
    for name, neutral in _NEUTRAL_PARAMETERS.items():
        if name in inputs:
            inputs[name] = [*get_const_value(inputs[name]), neutral]
    column: Var = mb.squeeze(x=getattr(mb, op.op_type)(**inputs), axes=[1])
    return column
