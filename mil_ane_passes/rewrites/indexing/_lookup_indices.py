"""Dynamic indices of lookups: the ops that prepare them, and the ops that read them."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.query import get_const_value, get_consumers, get_static_shape

__all__ = ["LOOKUP_OPS", "find_unwrapped_indices", "is_only_looked_up", "read_indexed_extents"]

LOOKUP_OPS = ("gather", "gather_along_axis", "gather_nd")
_INDEX_PREPARATION_OPS = ("cast", "greater_equal", "add", "select")


def read_indexed_extents(op: Operation) -> tuple[int, ...] | None:
    """Return the extents that the indices refer to, or None where they are unknown.

    These are one extent, or for gather_nd one for each coordinate.
    """
    shape = get_static_shape(op.x)
    if shape is None:
        return None
    if op.op_type != "gather_nd":
        axis = get_const_value(op.axis, 0)
        return (shape[axis],) if isinstance(axis, int) and shape else None
    known, first = get_static_shape(op.indices), get_const_value(op.inputs.get("batch_dims"), 0)
    return shape[first:first + known[-1]] if known else None


def find_unwrapped_indices(index: Var, extents: tuple[int, ...]) -> tuple[Var, Var] | None:
    """Find the indices before they were wrapped into range, and the first value that is in range; None if not found."""
    found, start, var = None, index, index
    while var.op is not None:
        op = var.op
        if op.op_type == "cast" and _is_lossless_index_cast(op.x.dtype, var.dtype, extents):
            var = op.x
        elif op.op_type == "select" and _is_negative_index_wrap(op, extents):
            found, start, var = op.outputs[0], op.a, op.a
        else:
            break
    return None if found is None else (_skip_lossless_casts(start, extents), found)


def _skip_lossless_casts(start: Var, extents: tuple[int, ...]) -> Var:
    """Return `start` before casts that preserve every index, negative ones too."""
    while start.op is not None and start.op.op_type == "cast" and start.dtype in (types.int16, types.int32) and \
            _is_lossless_index_cast(start.op.x.dtype, start.dtype, extents):
        start = start.op.x
    return start


def _is_lossless_index_cast(given: type, made: type, extents: tuple[int, ...]) -> bool:
    """Return whether a cast from `given` to `made` preserves every index."""
    if given not in (types.int16, types.uint16, types.int32):
        return False
    most = {types.int16: 2**15, types.uint16: 2**16, types.int32: 2**31}.get(made, 0)
    return max(extents) <= most


def _is_negative_index_wrap(op: Operation, extents: tuple[int, ...]) -> bool:
    """Return whether a select is i >= 0 ? i : i + n."""
    above, later = op.cond.op, op.b.op
    if above is None or later is None or above.op_type != "greater_equal" or later.op_type != "add":
        return False
    added = np.broadcast_to(later.y.val, (len(extents),)) if np.size(later.y.val) in (1, len(extents)) else None
    return bool(above.x is op.a and later.x is op.a and get_const_value(above.y) == 0
                and added is not None and tuple(added) == extents)


def is_only_looked_up(index: Var, extents: tuple[int, ...]) -> bool:
    """Return whether all readers of `index`, through its preparation, are lookups in `extents`."""
    pending, seen = [index], {index}
    while pending:
        var = pending.pop()
        if var.consuming_blocks:
            return False
        for op in get_consumers(var):
            if op.op_type in LOOKUP_OPS:
                if op.indices is not var or op.x is var or read_indexed_extents(op) != extents:
                    return False
            elif op.op_type not in _INDEX_PREPARATION_OPS:
                return False
            else:
                pending += [made for made in op.outputs if made not in seen]
                seen.update(op.outputs)
    return True
