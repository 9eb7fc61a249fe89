"""Fills with one number: find those whose readers accept a single element, and build those of dynamic size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_consumers, is_symbolic
from ..convolution._conv_1d_lifting import rebuild_op
from ._generated_constants import AxisSize, build_shared_const, extract_axis_line, trace_shape_sources

__all__ = [
    "FILL_OPS",
    "build_dynamic_fill",
    "build_filled_const",
    "can_all_readers_broadcast",
    "count_static_bytes",
    "read_fill_dimensions",
    "rebuild_readers_with_scalar",
]

FILL_OPS = ("fill", "fill_like")
_BINARY_OPS = frozenset({
    "add", "sub", "mul", "real_div", "floor_div", "mod", "pow", "maximum", "minimum", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
})
_MAX_READERS = 64
"Most readers of a fill that are examined."


def read_fill_dimensions(op: Operation) -> list[int | AxisSize | None]:
    """Return the source of each extent of the fill: a number, the extent of another value, or None if unknown."""
    made = op.outputs[0].shape
    if op.op_type == "fill_like":
        return [
            AxisSize(op.ref_tensor, axis) if is_symbolic(extent) else int(extent) for axis, extent in enumerate(made)
        ]
    found = trace_shape_sources(op.shape)
    found = found if found is not None and len(found) == len(made) else [None] * len(made)
    return [given if is_symbolic(extent) else int(extent) for extent, given in zip(made, found)]


def can_all_readers_broadcast(op: Operation, dims: Sequence[int | AxisSize | None]) -> bool:
    """Return whether all readers of the fill keep shape and values when the fill is a single element."""
    made = op.outputs[0]
    readers = get_consumers(made)
    if made.consuming_blocks or not 0 < len(readers) <= _MAX_READERS:
        return False
    known = [{extent, each.var.shape[each.axis] if isinstance(each, AxisSize) else extent}
             for extent, each in zip(made.shape, dims)]
    return all(
        reader.enclosing_block is op.enclosing_block and _has_full_extents(reader, made, known) for reader in readers
    )


def _has_full_extents(reader: Operation, made: Var, known: Sequence[set[Any]]) -> bool:
    """Return whether the other operands alone have every extent that the fill has."""
    if reader.op_type not in _BINARY_OPS and reader.op_type != "select":
        return False
    names = ("a", "b") if reader.op_type == "select" else ("x", "y")
    others = [reader.inputs[name] for name in names if reader.inputs[name] is not made]
    others = [other for other in others if other.op is None or other.op.op_type not in FILL_OPS]
    return all(1 in extents or any(
        other.rank >= behind and other.shape[-behind] in extents for other in others)
        for behind, extents in enumerate(reversed(known), start=1))


def rebuild_readers_with_scalar(mb: RewriteBuilder, op: Operation, number: np.generic) -> dict[Var, Var]:
    """Rebuild the fill's readers, each with a single element in place of the fill."""
    made = op.outputs[0]
    one = build_filled_const(mb, (1,) * made.rank, number)
    instead = {}
    for reader in get_consumers(made):
        with mb.at(reader):
            given = {name: one for name, var in reader.inputs.items() if var is made}
            instead[reader.outputs[0]] = rebuild_op(mb, reader, **given)
    return instead


def build_filled_const(mb: RewriteBuilder, shape: tuple[int, ...], number: np.generic) -> Var:
    return build_shared_const(mb, ("filled", *shape, number.dtype.name, number.tobytes()),
                              lambda: np.full(shape, number) if shape else number)


def count_static_bytes(dims: Sequence[int | AxisSize | None], number: np.generic) -> int:
    """Count the bytes of the const in `build_filled_const` for a fill: its axes of known size."""
    return math.prod(extent for extent in dims if isinstance(extent, int)) * number.itemsize


def build_dynamic_fill(mb: RewriteBuilder, dims: Sequence[int | AxisSize | None], number: np.generic) -> Var:
    """Build a fill of dynamic size without reading the elements of the values that its size comes from.

    Nothing is greater than itself, neither a number nor an infinity nor NaN. Thus greater(x, x), cast, is 0 everywhere.
    """
    truth = number.dtype == np.bool_
    held = np.float16(bool(number)) if truth else number
    dtype = {"float16": "fp16", "float32": "fp32"}[held.dtype.name]
    made = build_filled_const(mb, tuple(extent if isinstance(extent, int) else 1 for extent in dims), held)
    for axis, size in enumerate(dims):
        if isinstance(size, AxisSize):
            part = extract_axis_line(mb, size, len(dims), axis)
            zeros = mb.cast(x=mb.greater(x=part, y=part), dtype=dtype)
            # 0 * 0 keeps the sign of the other 0, and 0 + x is x for what is not 0.
            made = mb.mul(x=zeros, y=made) if held == 0 else mb.add(x=zeros, y=made)
    return mb.greater(x=made, y=np.float16(0.5)) if truth else made
