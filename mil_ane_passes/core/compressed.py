"""Compressed weights (`constexpr_*`) shown with one more axis of extent 1, still compressed.

The packed data stays as it is: only shapes and axis numbers change, along the whole chain where one constexpr feeds
another (iOS18 joint compression).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from .build import RewriteBuilder
from .query import is_compressed, is_const

__all__ = ["cannot_insert_axis", "with_unit_axis"]

_FLAT = frozenset({"nonzero_data", "indices_nonzero_data"})
"Inputs that list elements without a shape of their own."
_PER_CHANNEL = frozenset({"zero_point", "output_dtype"})
_DENSE = frozenset({"quantized_data", "source_val", "data", "indices", "mask", "data_mask", "indices_mask", "lut",
                    "scale", "offset"})
_AXES = frozenset({"axis", "vector_axis"})
_KNOWN = _FLAT | _PER_CHANNEL | _DENSE | _AXES | {"shape"}


def cannot_insert_axis(var: Var) -> str | None:
    """Why `with_unit_axis` cannot serve `var`, or None when it can."""
    if not is_compressed(var):
        return None
    for name, bound in var.op.inputs.items():
        if name not in _KNOWN:
            return f"weight is compressed by {var.op.op_type} with an input '{name}' that is not known here"
        if not is_const(bound):
            reason = cannot_insert_axis(bound) if is_compressed(bound) else f"its input '{name}' is not constant"
            if reason:
                return reason
    return None


def with_unit_axis(mb: RewriteBuilder, var: Var, axis: int) -> Var:
    """`var` (const, compressed or computed) with an axis of extent 1 inserted before position `axis`.

    A const becomes a view of the same bytes, a compressed weight the same packed data under a longer shape, and a
    computed one an `expand_dims`. Asked again for the same `var` it returns the same result.
    """
    if is_const(var):
        return mb.reshaped(var, _inserted(tuple(var.shape), axis))

    def make() -> Any:
        with mb.at(mb.early(var), var.name):
            return _rebuilt(mb, var, axis) if is_compressed(var) else mb.expand_dims(x=var, axes=[axis])

    lifted: Var = mb.once(("unit axis", var, axis), make)
    return lifted


def _inserted(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis:])


def _rebuilt(mb: RewriteBuilder, var: Var, axis: int) -> Var:
    op = var.op
    inputs = {name: _input(mb, op, name, bound, axis) for name, bound in op.inputs.items()}
    made = mb.once(("constexpr", op, axis), lambda: getattr(mb, op.op_type)(**inputs))
    outputs: list[Var] = list(made) if isinstance(made, (list, tuple)) else [made]
    return outputs[op.outputs.index(var)]


def _rank(op: Operation) -> int:
    """The rank of what the constexpr makes, which is that of its packed data."""
    packed = ("quantized_data", "indices", "indices_mask")
    return next(int(op.inputs[name].rank) for name in packed if name in op.inputs)


def _input(mb: RewriteBuilder, op: Operation, name: str, bound: Var, axis: int) -> Any:
    """One input of the rebuilt constexpr. iOS16 forms carry a `shape` and hold their elements flat."""
    if is_compressed(bound):
        return with_unit_axis(mb, bound, axis)
    if name == "shape":
        return np.insert(bound.val, axis, 1)
    if name in _AXES:
        number = int(bound.val) % _rank(op)
        return np.asarray(number + (number >= axis), dtype=np.asarray(bound.val).dtype)[()]
    flat = "shape" in op.inputs or bound.rank == 0 or (name == "scale" and "zero_point" in op.inputs)
    if name in _DENSE and not flat:
        return mb.reshaped(bound, _inserted(tuple(bound.shape), axis))
    return bound
