"""Constant propagation: infer the values that follow from a value that has become known."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.query import get_consumers, get_flat_inputs, get_type_info, is_opaque

__all__ = ["propagate_constant"]

_MAX_ELEMENTS = 1 << 16
"Most elements of a value that is inferred."
_UNFOLDABLE_PREFIXES = (
    "const",
    "random_",
    "read_state",
    "coreml_update_state",
    "write_state",
    "custom_layer",
    "classify",
)


def propagate_constant(op: Operation, value: np.ndarray[Any, Any]) -> None:
    """Set the value of the only output of `op`, and infer the values of its consumers.

    coremltools infers values only while it builds an op, so that this has to be done anew.
    """
    told = op.outputs[0]
    _set_value(told, value if told.rank else value.reshape(-1)[0])
    pending = list(get_consumers(told))
    while pending:
        reader = pending.pop()
        if _infer_output_values(reader):
            pending.extend(op for var in reader.outputs for op in get_consumers(var))


def _set_value(var: Var, value: Any) -> None:
    held = var.sym_type()
    held.val = value
    var._sym_val = held


def _infer_output_values(op: Operation) -> bool:
    """Infer the values of the outputs of `op`; return whether they were unknown and are known now."""
    if op.blocks or is_opaque(op) or op.op_type.startswith(_UNFOLDABLE_PREFIXES) or not op.outputs:
        return False
    for var in op.outputs:
        shape = get_type_info(var).shape
        if (
            types.is_list(var.sym_type)
            or var._sym_val is not None
            or shape is None
            or int(np.prod(shape)) > _MAX_ELEMENTS
        ):
            return False
    if any(types.is_list(var.sym_type) or var._sym_val is None or var.val is None for var in get_flat_inputs(op)):
        return False
    found = op._auto_val(tuple(var.sym_type for var in op.outputs))
    for var, held in zip(op.outputs, found):
        var._sym_val = held
    return all(held is not None for held in found)
