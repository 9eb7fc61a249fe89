"""Compile-time constants: values that are known during conversion and are the same wherever they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import ListVar, Operation, Var, types

from ...ir.query import get_flat_inputs, get_itemsize, get_type_info, is_opaque

__all__ = ["Float64Values", "count_output_bytes", "get_constant_value", "is_compile_time_constant"]

_DATA_MOVEMENT_OPS = frozenset({
    "broadcast_to", "concat", "expand_dims", "fill", "fill_like", "gather", "gather_along_axis", "gather_nd",
    "identity", "pad", "reshape", "reverse", "select", "slice_by_index", "slice_by_size", "slice_update", "split",
    "squeeze", "stack", "tile", "transpose",
})
"Ops that only move data: floats come out with the same bits."
_UNFOLDABLE_PREFIXES = (
    "const",
    "random_",
    "read_state",
    "coreml_update_state",
    "write_state",
    "custom_layer",
    "classify",
)
"Prefixes of op types that compute nothing, or not the same value each time."
_FLOAT_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "ceil": np.ceil, "floor": np.floor, "floor_div": np.floor_divide,
    "maximum": np.maximum, "minimum": np.minimum, "mul": np.multiply, "real_div": np.divide, "sqrt": np.sqrt,
    "sub": np.subtract,
}
"Float arithmetic that occurs in size computations."


def get_constant_value(var: Var) -> Any:
    """Return the value of `var` where it is known and has exactly the shape and dtype of its type, else None."""
    if isinstance(var, ListVar) or not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
        return None
    if var._sym_val is None or types.is_sub_byte(var.dtype) or var.dtype == types.str or var.val is None:
        return None
    array = np.asarray(var.val)
    right = array.shape == tuple(var.shape) and array.dtype == np.dtype(types.nptype_from_builtin(var.dtype))
    return var.val if right else None


def is_compile_time_constant(op: Operation, most: int) -> bool:
    """Return whether all outputs of `op` are known, are the same wherever computed, and have at most `most` bytes.

    Integers and bools qualify. Floats qualify where they are only moved, or are integers that a float represents
    exactly.
    """
    if op.op_type.startswith(_UNFOLDABLE_PREFIXES) or op.blocks or is_opaque(op) or not op.outputs:
        return False
    if (
        any(get_type_info(var).shape is None or get_constant_value(var) is None for var in op.outputs)
        or count_output_bytes(op) > most
    ):
        return False
    return (
        not any(types.is_float(var.dtype) for var in op.outputs)
        or op.op_type in _DATA_MOVEMENT_OPS
        or _is_exact_cast(op)
    )


class Float64Values:
    """Values of compile-time constants with all floats computed in double precision.

    A value that is only moved, or an integer, may still depend on a float that was rounded to its dtype before.
    """

    def __init__(self) -> None:
        self._found: dict[Var, Any] = {}

    def are_exact_in_float64(self, op: Operation) -> bool:
        """Return whether all outputs of `op` are the same in double precision."""
        return all(self._is_stored_value(var, self.of(var)) for var in op.outputs)

    def of(self, var: Var) -> Any:
        """Return the value of `var` in double precision, None where it is not computed."""
        left = [var]
        while left:
            missing = [each for each in self._read(left[-1]) if each not in self._found]
            if not missing:
                last = left.pop()
                self._found[last] = self._computed(last)
            left += missing
        return self._found[var]

    @staticmethod
    def _read(var: Var) -> list[Var]:
        """Return the values that `var` is computed from; of a value that is not a constant only the shape is read."""
        if var.op is None or var.op.op_type in ("const", "shape"):
            return []
        return [each for each in get_flat_inputs(var.op) if each.val is not None]

    def _computed(self, var: Var) -> Any:
        op, read = var.op, self._read(var)
        if op is None or op.op_type == "const":
            return var.val
        if get_constant_value(var) is None or any(self._found[each] is None for each in read):
            return None
        if op.op_type in _FLOAT_ARITHMETIC and types.is_float(var.dtype):
            operands = [self._found.get(op.inputs[name]) for name in ("x", "y") if op.inputs.get(name) is not None]
            if any(each is None for each in operands):
                return None
            with np.errstate(all="ignore"):
                return _FLOAT_ARITHMETIC[op.op_type](*(np.asarray(each, np.float64) for each in operands))
        if op.op_type == "cast" and types.is_int(var.dtype) and op.x in self._found:
            return np.trunc(self._found[op.x])
        same = all(self._is_stored_value(each, self._found[each]) for each in read)
        exact = not types.is_float(var.dtype) or op.op_type in _DATA_MOVEMENT_OPS or _is_exact_cast(op)
        return var.val if same and exact else None

    @staticmethod
    def _is_stored_value(var: Var, found: Any) -> bool:
        if found is var.val or found is None:
            return found is not None
        return bool(np.array_equal(found, var.val, equal_nan=types.is_float(var.dtype)))


def count_output_bytes(op: Operation) -> int:
    """Count the bytes of the outputs of `op` whose sizes are fixed."""
    return sum(int(np.prod(get_type_info(var).shape or (), dtype=np.int64)) * get_itemsize(var) for var in op.outputs)


def _is_exact_cast(op: Operation) -> bool:
    if op.op_type != "cast":
        return False
    given, made = np.asarray(op.x.val), np.asarray(op.outputs[0].val)
    return bool(np.array_equal(given.astype(np.float64), made.astype(np.float64)))
