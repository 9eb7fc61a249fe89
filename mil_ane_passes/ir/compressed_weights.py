"""Insertion of an axis of extent 1 into compressed weights (`constexpr_*`) without decompressing them.

The packed data is unchanged: only shapes and axis numbers change. If one constexpr feeds another (joint compression of
iOS 18), both change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from .builder import RewriteBuilder
from .query import is_compressed, is_const

__all__ = ["explain_axis_obstacle", "insert_unit_axis"]

_FLAT_INPUTS = frozenset({"nonzero_data", "indices_nonzero_data"})
"Inputs that list elements in one dimension, whatever the shape of the weight."
_UNCHANGED_INPUTS = frozenset({"zero_point", "output_dtype"})
_DENSE_INPUTS = frozenset(
    {"quantized_data", "source_val", "data", "indices", "mask", "data_mask", "indices_mask", "lut", "scale", "offset"}
)
_AXIS_INPUTS = frozenset({"axis", "vector_axis"})
_KNOWN_INPUTS = _FLAT_INPUTS | _UNCHANGED_INPUTS | _DENSE_INPUTS | _AXIS_INPUTS | {"shape"}


def explain_axis_obstacle(var: Var) -> str | None:
    """Return the reason why `insert_unit_axis` does not support `var`; None if it does."""
    if not is_compressed(var):
        return None
    for name, bound in var.op.inputs.items():
        if name not in _KNOWN_INPUTS:
            return f"weight is compressed by {var.op.op_type} with an unknown input '{name}'"
        if not is_const(bound):
            reason = explain_axis_obstacle(bound) if is_compressed(bound) else f"its input '{name}' is not constant"
            if reason:
                return reason
    return None


def insert_unit_axis(mb: RewriteBuilder, var: Var, axis: int) -> Var:
    """Insert an axis of extent 1 into `var` (const, compressed or computed) before position `axis`.

    A const becomes a view of the same bytes. A compressed weight keeps its packed data and gets a shape with one more
    axis. A computed value gets an `expand_dims`. Repeated calls for the same `var` return the same result.
    """
    if is_const(var):
        return mb.reshaped(var, _insert_one_in_shape(tuple(var.shape), axis))

    def build_lifted() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            return _rebuild_constexpr(mb, var, axis) if is_compressed(var) else mb.expand_dims(x=var, axes=[axis])

    lifted: Var = mb.once(("unit axis", var, axis), build_lifted)
    return lifted


def _insert_one_in_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis:])


def _rebuild_constexpr(mb: RewriteBuilder, var: Var, axis: int) -> Var:
    op = var.op
    inputs = {name: _rebuild_input(mb, op, name, bound, axis) for name, bound in op.inputs.items()}
    built = mb.once(("constexpr", op, axis), lambda: getattr(mb, op.op_type)(**inputs))
    outputs: list[Var] = list(built) if isinstance(built, (list, tuple)) else [built]
    return outputs[op.outputs.index(var)]


def _get_dense_rank(op: Operation) -> int:
    """Return the rank of the constexpr's result, which equals the rank of its packed data."""
    packed = ("quantized_data", "indices", "indices_mask")
    return next(int(op.inputs[name].rank) for name in packed if name in op.inputs)


def _rebuild_input(mb: RewriteBuilder, op: Operation, name: str, bound: Var, axis: int) -> Any:
    """Build one input of the new constexpr. The iOS 16 ops have an input `shape` and store their elements flat."""
    if is_compressed(bound):
        return insert_unit_axis(mb, bound, axis)
    if name == "shape":
        return np.insert(bound.val, axis, 1)
    if name in _AXIS_INPUTS:
        number = int(bound.val) % _get_dense_rank(op)
        return np.asarray(number + (number >= axis), dtype=np.asarray(bound.val).dtype)[()]
    flat = "shape" in op.inputs or bound.rank == 0 or (name == "scale" and "zero_point" in op.inputs)
    if name in _DENSE_INPUTS and not flat:
        return mb.reshaped(bound, _insert_one_in_shape(tuple(bound.shape), axis))
    return bound
