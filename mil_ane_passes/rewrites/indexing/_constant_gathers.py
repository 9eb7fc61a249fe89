"""Gathers at constant indices: whether the indices are in range, and the values they read of a constant."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation

from ...ir.query import get_const_value, is_symbolic

__all__ = ["GATHER_OPS", "evaluate_gather", "find_out_of_range_index", "normalize_indices"]

GATHER_OPS = ("gather", "gather_nd", "gather_along_axis")
_Array = np.ndarray[Any, Any]


def find_out_of_range_index(op: Operation) -> str:
    """Return why a constant index of `op` is outside of its table, or "" where all are inside."""
    indices, batch = np.asarray(op.indices.val).astype(np.int64), int(get_const_value(op.inputs.get("batch_dims"), 0))
    if op.op_type == "gather_nd":
        columns = np.moveaxis(indices, -1, 0)
        found = [normalize_indices(column, op.x.shape[batch + axis]) for axis, column in enumerate(columns)]
    else:
        found = [normalize_indices(indices, op.x.shape[int(op.axis.val) % op.x.rank])]
    return next((reason for reason in found if isinstance(reason, str)), "")


def normalize_indices(indices: _Array, extent: Any) -> _Array | str:
    """Return `indices` counted from the front, or why they cannot be."""
    if is_symbolic(extent):
        return "it reads from an axis of symbolic size"
    wrong = indices[(indices < -extent) | (indices >= extent)]
    if wrong.size:
        return f"index {wrong[0]} is out of range for {extent} elements"
    return np.where(indices < 0, indices + extent, indices)


def evaluate_gather(op: Operation) -> _Array:
    """Compute the output of `op` where both its table and its indices are constant."""
    table, indices = np.asarray(op.x.val), np.asarray(op.indices.val).astype(np.int64)
    batch = int(get_const_value(op.inputs.get("batch_dims"), 0))
    if op.op_type == "gather_along_axis":
        return np.take_along_axis(table, indices, int(op.axis.val))
    if op.op_type == "gather" and not batch:
        return np.take(table, indices, int(op.axis.val))
    if op.op_type == "gather":
        axis = int(op.axis.val) % table.ndim
        fronts = [np.take(table[at], indices[at], axis - batch) for at in np.ndindex(*indices.shape[:batch])]
        joined: _Array = np.stack(fronts).reshape(*indices.shape[:batch], *fronts[0].shape)
        return joined
    lead = np.indices(indices.shape[:-1], sparse=True)[:batch]
    places = (*lead, *np.moveaxis(indices, -1, 0))
    found: _Array = table[places]
    return found
