"""Constants that replace generated values, and the sources of the sizes of generated values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.block_editor import get_first_op
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_symbolic

MAX_EXACT_INTEGER = 2048
"Magnitude up to which fp16 represents all integers; a larger one is never rounded to one below."
_MAX_SHAPE_DEPTH, _MAX_SHAPE_LENGTH = 16, 16
"Most ops that a shape is followed back, and most numbers in it."
_MAX_LAYOUT_OPS, _MAX_CASTS = 4, 16
"Most layout ops before a cast, and most casts of one value."
_LAYOUT_OPS = ("expand_dims", "squeeze", "reshape", "transpose", "identity")
Array = np.ndarray[Any, Any]


class AxisSize(NamedTuple):
    """The source of a number in a shape: axis `axis` of `var`."""

    var: Var
    axis: int


ShapeSource: TypeAlias = int | AxisSize | None
"""The source of a number in a shape: the number itself, an axis, or None where it is not known."""


def build_shared_const(mb: RewriteBuilder, key: tuple[Any, ...], make: Callable[[], Array | np.generic]) -> Var:
    """Return a const of `make()`, shared by all users in the block with the same `key`."""

    def build_const() -> Any:
        name = "_".join(str(each) for each in key[:5] if isinstance(each, (str, int)))
        with mb.at(get_first_op(mb.block), name):
            return mb.const(val=make())

    const: Var = mb.once(key, build_const)
    return const


def describe_size_excess(nbytes: int, max_bytes: int) -> str:
    return f"the constant is {nbytes} bytes, above max_bytes={max_bytes}"


@dataclass(frozen=True)
class FloatCasts:
    """The casts of integers to floating-point type `dtype`, each with the layout ops before it."""

    dtype: Any
    casts: tuple[tuple[tuple[Operation, ...], Operation], ...]


def find_float_casts(op: Operation) -> FloatCasts | None:
    """Find the casts to one floating-point type that all readers of `op` are or lead to by layout ops alone, or
    None."""
    casts: list[tuple[tuple[Operation, ...], Operation]] = []
    pending: list[tuple[tuple[Operation, ...], Var]] = [((), op.outputs[0])]
    while pending:
        path, var = pending.pop()
        readers = get_consumers(var)
        too_many = len(casts) + len(pending) > _MAX_CASTS or len(path) > _MAX_LAYOUT_OPS
        if not readers or var.consuming_blocks or too_many:
            return None
        for reader in readers:
            if reader.enclosing_block is not op.enclosing_block:
                return None
            if reader.op_type == "cast" and types.is_float(reader.outputs[0].dtype):
                casts.append((path, reader))
            elif reader.op_type in _LAYOUT_OPS and _reads_only(reader, var):
                pending.append(((*path, reader), reader.outputs[0]))
            else:
                return None
    dtypes = {cast.outputs[0].dtype for _, cast in casts}
    return FloatCasts(dtypes.pop(), tuple(casts)) if len(dtypes) == 1 else None


def _reads_only(op: Operation, var: Var) -> bool:
    """Return whether all inputs of `op` besides `var` are known."""
    return all(bound is var or (isinstance(bound, Var) and bound.val is not None) for bound in op.inputs.values())


def replace_float_casts(mb: RewriteBuilder, float_casts: FloatCasts, value: Var) -> dict[Var, Var]:
    """Return the replacements of the casts when `value`, of their type, replaces the integers."""
    replacements = {}
    for path, cast in float_casts.casts:
        moved = value
        with mb.at(cast):
            for layout_op in path:
                moved = rebuild_op(mb, layout_op, x=moved)
        replacements[cast.outputs[0]] = moved
    return replacements


def trace_shape_sources(shape: Var, depth: int = 0) -> list[ShapeSource] | None:
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
    sources = trace_shape_sources(op.x, depth + 1)
    return None if sources is None else _SHAPE_TRACERS[op.op_type](op, sources)


def _trace_concat(parts: list[list[ShapeSource] | None], values: Any) -> list[ShapeSource] | None:
    lengths = [1 if var.rank == 0 else var.shape[0] for var in values]
    if any(is_symbolic(length) for length in lengths) or sum(map(int, lengths)) > _MAX_SHAPE_LENGTH:
        return None
    return [source for part, length in zip(parts, lengths) for source in (part or [None] * int(length))]


def _trace_gather(op: Operation, sources: list[ShapeSource]) -> list[ShapeSource] | None:
    indices = get_const_value(op.indices)
    if indices is None or op.x.rank != 1:
        return None
    return [sources[index] if -len(sources) <= index < len(sources) else None for index in np.ravel(indices)]


def _trace_slice(op: Operation, sources: list[ShapeSource]) -> list[ShapeSource] | None:
    if op.x.rank != 1 or any(op.inputs[name] is None or op.inputs[name].val is None for name in ("begin", "end")):
        return None

    def read_parameter(name: str, default: Any) -> Any:
        return (get_const_value(op.inputs.get(name)) or [default])[0]

    begin = None if read_parameter("begin_mask", False) else int(get_const_value(op.begin)[0])
    end = None if read_parameter("end_mask", False) else int(get_const_value(op.end)[0])
    if read_parameter("squeeze_mask", False) and -len(sources) <= (begin or 0) < len(sources):
        return [sources[begin or 0]]
    return sources[begin:end:int(read_parameter("stride", 1))]


def _trace_unchanged(op: Operation, sources: list[ShapeSource]) -> list[ShapeSource] | None:
    return sources if types.is_int(op.outputs[0].dtype) else None


_SHAPE_TRACERS: dict[str, Callable[[Operation, list[ShapeSource]], list[ShapeSource] | None]] = {
    "gather": _trace_gather,
    "slice_by_index": _trace_slice,
    **dict.fromkeys(("cast", "identity", "squeeze", "expand_dims", "reshape"), _trace_unchanged),
}
"The sources of the numbers in an op's result from those in its x."


def extract_axis_line(mb: RewriteBuilder, size: AxisSize, rank: int, axis: int) -> Var:
    """Extract a part of the size's value that has its extent along `axis` of `rank` axes; the other extents are 1.

    The part is floating point: integers are cast, in one op at the edge, as the ops after it would leave the ANE with
    them.
    """
    var = size.var
    if not types.is_float(var.dtype):
        var = mb.once(("cast", var), lambda: mb.cast(x=size.var, dtype="fp16"))
    line = var
    if var.rank != 1:
        along = [each == size.axis for each in range(var.rank)]
        line = mb.slice_by_index(x=var, begin=[0] * var.rank, end=[int(not each) for each in along], end_mask=along)
    if (rank, axis) == (var.rank, size.axis):
        return line
    result: Var = mb.reshape(x=line, shape=[-1 if each == axis else 1 for each in range(rank)])
    return result


def cut_const_to_length(mb: RewriteBuilder, const: Var, like: Var, axis: int) -> Var:
    """Return as many elements of `const` as `like` has along `axis`; no element of `like` is read.

    The two are concatenated, and a slice drops as many elements from the end as `const` has: its parameters are
    constant, whereas a slice with a computed end leaves the ANE.
    """
    joined = mb.concat(values=[const, like], axis=axis)
    ends = [0] * const.rank
    ends[axis] = -int(const.shape[axis])
    result: Var = mb.slice_by_index(x=joined, begin=[0] * const.rank, end=ends,
                                    end_mask=[each != axis for each in range(const.rank)])
    return result
