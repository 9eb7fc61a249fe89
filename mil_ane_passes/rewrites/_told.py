"""What follows from a value that has become known."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..core.query import consumers, flat_inputs, is_opaque, kind_of

__all__ = ["tell"]

_MOST = 1 << 16
"The most elements of a value that is worked out."
_NEVER = ("const", "random_", "read_state", "coreml_update_state", "write_state", "custom_layer", "classify")


def tell(op: Operation, value: np.ndarray[Any, Any]) -> None:
    """Say what the only output of `op` is, and work out what the host can of it: it does so only as it builds an op."""
    told = op.outputs[0]
    _say(told, value if told.rank else value.reshape(-1)[0])
    pending = list(consumers(told))
    while pending:
        reader = pending.pop()
        if _worked_out(reader):
            pending.extend(op for var in reader.outputs for op in consumers(var))


def _say(var: Var, value: Any) -> None:
    held = var.sym_type()
    held.val = value
    var._sym_val = held


def _worked_out(op: Operation) -> bool:
    """Whether the outputs of `op` were not known, and are now."""
    if op.blocks or is_opaque(op) or op.op_type.startswith(_NEVER) or not op.outputs:
        return False
    for var in op.outputs:
        shape = kind_of(var).shape
        if types.is_list(var.sym_type) or var._sym_val is not None or shape is None or int(np.prod(shape)) > _MOST:
            return False
    if any(types.is_list(var.sym_type) or var._sym_val is None or var.val is None for var in flat_inputs(op)):
        return False
    found = op._auto_val(tuple(var.sym_type for var in op.outputs))
    for var, held in zip(op.outputs, found):
        var._sym_val = held
    return all(held is not None for held in found)
