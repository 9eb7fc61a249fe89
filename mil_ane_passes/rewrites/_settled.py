"""What an op makes that is known when the model is made, and the same wherever it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import ListVar, Operation, Var, types

from ..core.query import is_opaque, itemsize, kind_of

__all__ = ["held_bytes", "known", "settled"]

_MOVES = frozenset({
    "broadcast_to", "concat", "expand_dims", "fill", "fill_like", "gather", "gather_along_axis", "gather_nd",
    "identity", "pad", "reshape", "reverse", "select", "slice_by_index", "slice_by_size", "slice_update", "split",
    "squeeze", "stack", "tile", "transpose",
})
"Ops that move what they read: floats come out with the same bits."
_NEVER = ("const", "random_", "read_state", "coreml_update_state", "write_state", "custom_layer", "classify")
"Beginnings of kinds that are no computation, or not the same one each time."


def known(var: Var) -> Any:
    """The value of `var` where it is known and just what its type says, else None."""
    if isinstance(var, ListVar) or not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
        return None
    if var._sym_val is None or types.is_sub_byte(var.dtype) or var.dtype == types.str or var.val is None:
        return None
    array = np.asarray(var.val)
    right = array.shape == tuple(var.shape) and array.dtype == np.dtype(types.nptype_from_builtin(var.dtype))
    return var.val if right else None


def settled(op: Operation, most: int) -> bool:
    """Whether all that `op` makes is known, has `most` bytes at most, and is the same wherever it is computed.

    Integers and truth values are; of floats those that are only moved, and integers that a float holds exactly.
    """
    if op.op_type.startswith(_NEVER) or op.blocks or is_opaque(op) or not op.outputs:
        return False
    if any(kind_of(var).shape is None or known(var) is None for var in op.outputs) or held_bytes(op) > most:
        return False
    return not any(types.is_float(var.dtype) for var in op.outputs) or op.op_type in _MOVES or _exact_cast(op)


def held_bytes(op: Operation) -> int:
    """Bytes of what `op` makes, where its sizes are fixed."""
    return sum(int(np.prod(kind_of(var).shape or (), dtype=np.int64)) * itemsize(var) for var in op.outputs)


def _exact_cast(op: Operation) -> bool:
    if op.op_type != "cast":
        return False
    given, made = np.asarray(op.x.val), np.asarray(op.outputs[0].val)
    return bool(np.array_equal(given.astype(np.float64), made.astype(np.float64)))
