"""Constants in place of values that a model generates, and the sizes that a generated value takes from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.block_editor import get_first_op
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_symbolic

__all__ = [
    "AxisSize",
    "FloatCasts",
    "build_shared_const",
    "cut_const_to_length",
    "describe_size_excess",
    "extract_axis_line",
    "find_float_casts",
    "replace_float_casts",
    "trace_shape_sources",
]

_MAX_SHAPE_DEPTH, _MAX_SHAPE_LENGTH, _MAX_LAYOUT_OPS = 16, 16, 4
"Limits: ops that a shape is followed back, numbers in a shape, and layout ops before a cast."
_LAYOUT_OPS = ("expand_dims", "squeeze", "reshape", "transpose", "identity")
Array = np.ndarray[Any, Any]


class AxisSize(NamedTuple):
    """The source of a number in a shape: axis `axis` of `var`."""

    var: Var
    axis: int


def build_shared_const(mb: RewriteBuilder, what: tuple[Any, ...], make: Callable[[], Array | np.generic]) -> Var:
    """Return a const of `make()`, shared by all users in the block that need the same one."""

    def made() -> Any:
        with mb.at(get_first_op(mb.block), "_".join(str(each) for each in what[:5] if isinstance(each, (str, int)))):
            return mb.const(val=make())

    found: Var = mb.once(what, made)
    return found


def describe_size_excess(nbytes: int, max_bytes: int) -> str:
    return f"the constant is {nbytes} bytes, above max_bytes={max_bytes}"


@dataclass(frozen=True)
class FloatCasts:
    """The casts of integers to floating-point type `kind`, each with the layout ops before it."""

    kind: Any
    casts: tuple[tuple[tuple[Operation, ...], Operation], ...]


def find_float_casts(op: Operation) -> FloatCasts | None:
    """Find the casts to one floating-point type that all readers of `op` are or lead to by layout ops alone, or
    None."""
    found: list[tuple[tuple[Operation, ...], Operation]] = []
    pending: list[tuple[tuple[Operation, ...], Var]] = [((), op.outputs[0])]
    while pending:
        path, var = pending.pop()
        readers = get_consumers(var)
        if (
            not readers
            or var.consuming_blocks
            or len(found) + len(pending) > _MAX_SHAPE_LENGTH
            or len(path) > _MAX_LAYOUT_OPS
        ):
            return None
        for reader in readers:
            if reader.enclosing_block is not op.enclosing_block:
                return None
            if reader.op_type == "cast" and types.is_float(reader.outputs[0].dtype):
                found.append((path, reader))
            elif reader.op_type in _LAYOUT_OPS and all(
                    given is var or (isinstance(given, Var) and given.val is not None)
                    for given in reader.inputs.values()):
                pending.append(((*path, reader), reader.outputs[0]))
            else:
                return None
    kinds = {cast.outputs[0].dtype for _, cast in found}
    return FloatCasts(kinds.pop(), tuple(found)) if len(kinds) == 1 else None


def replace_float_casts(mb: RewriteBuilder, ends: FloatCasts, made: Var) -> dict[Var, Var]:
    """Return the replacements of the casts when `made`, of their type, replaces the integers."""
    instead = {}
    for path, cast in ends.casts:
        value = made
        with mb.at(cast):
            for move in path:
                value = rebuild_op(mb, move, x=value)
        instead[cast.outputs[0]] = value
    return instead


def trace_shape_sources(shape: Var, depth: int = 0) -> list[int | AxisSize | None] | None:
    """Return the source of each number of a one-dimensional (or scalar) `shape`; None for an unknown source."""
    if shape.val is not None:
        return [int(each) for each in np.ravel(shape.val)] if np.size(shape.val) <= _MAX_SHAPE_LENGTH else None
    op = shape.op
    if op is None or depth > _MAX_SHAPE_DEPTH:
        return None
    if op.op_type == "shape":
        return [AxisSize(op.x, axis) if is_symbolic(extent) else int(extent) for axis, extent in enumerate(op.x.shape)]
    if op.op_type == "concat":
        return _trace_concat([trace_shape_sources(var, depth + 1) for var in op.inputs["values"]], op.inputs["values"])
    if op.op_type not in _SHAPE_TRACERS:
        return None
    before = trace_shape_sources(op.x, depth + 1)
    return None if before is None else _SHAPE_TRACERS[op.op_type](op, before)


def _trace_concat(parts: list[list[int | AxisSize | None] | None], given: Any) -> list[int | AxisSize | None] | None:
    lengths = [1 if var.rank == 0 else var.shape[0] for var in given]
    if any(is_symbolic(length) for length in lengths) or sum(map(int, lengths)) > _MAX_SHAPE_LENGTH:
        return None
    return [each for part, length in zip(parts, lengths) for each in (part or [None] * int(length))]


def _trace_gather(op: Operation, before: list[int | AxisSize | None]) -> list[int | AxisSize | None] | None:
    places = get_const_value(op.indices)
    if places is None or op.x.rank != 1:
        return None
    return [before[place] if -len(before) <= place < len(before) else None for place in np.ravel(places)]


def _trace_slice(op: Operation, before: list[int | AxisSize | None]) -> list[int | AxisSize | None] | None:
    if op.x.rank != 1 or any(op.inputs[name] is None or op.inputs[name].val is None for name in ("begin", "end")):
        return None
    masks = [bool((get_const_value(op.inputs.get(name)) or [False])[0]) for name in ("begin_mask", "end_mask")]
    begin, end = (
        None if mask else int(get_const_value(op.inputs[name])[0]) for mask, name in zip(masks, ("begin", "end"))
    )
    step = int((get_const_value(op.inputs.get("stride")) or [1])[0])
    single = bool((get_const_value(op.inputs.get("squeeze_mask")) or [False])[0])
    return [before[begin or 0]] if single and -len(before) <= (begin or 0) < len(before) else before[begin:end:step]


def _trace_unchanged(op: Operation, before: list[int | AxisSize | None]) -> list[int | AxisSize | None] | None:
    return before if types.is_int(op.outputs[0].dtype) else None


_SHAPE_TRACERS: dict[str, Callable[[Operation, list[int | AxisSize | None]], list[int | AxisSize | None] | None]] = {
    "gather": _trace_gather,
    "slice_by_index": _trace_slice,
    "cast": _trace_unchanged,
    "identity": _trace_unchanged,
    "squeeze": _trace_unchanged,
    "expand_dims": _trace_unchanged,
    "reshape": _trace_unchanged,
}


def extract_axis_line(mb: RewriteBuilder, size: AxisSize, rank: int, axis: int) -> Var:
    """Extract a part of the size's value that has its extent along `axis` of `rank` axes; the other extents are 1.

    The part is floating point: integers are cast, in one op at the edge, as the ops after it would leave the ANE with
    them.
    """
    var = size.var
    if not types.is_float(var.dtype):
        var = mb.once(("cast", var), lambda: mb.cast(x=size.var, dtype="fp16"))
    ends = [int(each != size.axis) for each in range(var.rank)]
    part = var if var.rank == 1 else mb.slice_by_index(
        x=var, begin=[0] * var.rank, end=ends, end_mask=[each == size.axis for each in range(var.rank)])
    if (rank, axis) == (var.rank, size.axis):
        return part
    result: Var = mb.reshape(x=part, shape=[-1 if each == axis else 1 for each in range(rank)])
    return result


def cut_const_to_length(mb: RewriteBuilder, held: Var, like: Var, axis: int) -> Var:
    """Return as many elements of const `held` as `like` has along `axis`; no element of `like` is read.

    The two are joined, and as many elements as `held` has are cut off the end.
    """
    joined = mb.concat(values=[held, like], axis=axis)
    ends = [0] * held.rank
    ends[axis] = -int(held.shape[axis])
    result: Var = mb.slice_by_index(x=joined, begin=[0] * held.rank, end=ends,
                                    end_mask=[each != axis for each in range(held.rank)])
    return result
