"""Compile-time constants: values that are inferred during conversion and independent of the machine.

coremltools infers values while it builds an op, and never again. `propagate_constant` does so for the users of an op
whose value has become known since; `is_compile_time_constant` and `Float64Values` determine which of the inferred
values may be stored in place of the ops that compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import ListVar, Operation, Var, types

from ...ir.coremltools_internals import evaluate_op, get_typed_value, set_typed_value
from ...ir.query import DATA_MOVEMENT_OPS, get_consumers, get_flat_inputs, get_itemsize, get_type_info, is_opaque

_EXACT_OPS = DATA_MOVEMENT_OPS | {
    "broadcast_to", "fill", "fill_like", "gather_along_axis", "gather_nd", "pad", "slice_update",
}
"Ops that only move or repeat floats: they come out with the same bits."
_UNFOLDABLE_PREFIXES = (
    "const", "random_", "read_state", "coreml_update_state", "write_state", "custom_layer", "classify",
)
"Prefixes of op types that compute nothing, or not the same value each time."
_FLOAT_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "ceil": np.ceil, "floor": np.floor, "floor_div": np.floor_divide,
    "maximum": np.maximum, "minimum": np.minimum, "mul": np.multiply, "real_div": np.divide, "sqrt": np.sqrt,
    "sub": np.subtract,
}
"Float arithmetic that occurs in size computations."
_MAX_PROPAGATED_ELEMENTS = 1 << 16
"Maximum elements of a value inferred from a new constant: enough for masks and positions."


def get_constant_value(var: Var) -> Any:
    """Return the value of `var` where it is known and has exactly the shape and dtype of its type, else None."""
    if isinstance(var, ListVar) or not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
        return None
    if get_typed_value(var) is None or types.is_sub_byte(var.dtype) or var.dtype == types.str or var.val is None:
        return None
    array = np.asarray(var.val)
    has_type = array.shape == tuple(var.shape) and array.dtype == np.dtype(types.nptype_from_builtin(var.dtype))
    return var.val if has_type else None


def propagate_constant(op: Operation, value: np.ndarray[Any, Any]) -> None:
    """Set the value of the only output of `op`, and infer the values that follow from it."""
    output = op.outputs[0]
    typed_value = output.sym_type()
    typed_value.val = value if output.rank else value.reshape(-1)[0]
    set_typed_value(output, typed_value)
    pending = list(get_consumers(output))
    while pending:
        reader = pending.pop()
        if _infer_output_values(reader):
            pending.extend(op for var in reader.outputs for op in get_consumers(var))


def _infer_output_values(op: Operation) -> bool:
    """Infer the values of the outputs of `op`; return whether they were unknown and are known now."""
    if not _is_foldable(op) or not all(map(_is_inferable, op.outputs)):
        return False
    if any(
        types.is_list(var.sym_type) or get_typed_value(var) is None or var.val is None for var in get_flat_inputs(op)
    ):
        return False
    values = evaluate_op(op, tuple(var.sym_type for var in op.outputs))
    for var, value in zip(op.outputs, values):
        set_typed_value(var, value)
    return all(value is not None for value in values)


def _is_inferable(var: Var) -> bool:
    """Return whether `var` has no value yet, and is a tensor of a fixed shape that is not too large for one."""
    shape = get_type_info(var).shape
    return (not types.is_list(var.sym_type) and get_typed_value(var) is None and shape is not None
            and int(np.prod(shape)) <= _MAX_PROPAGATED_ELEMENTS)


def _is_foldable(op: Operation) -> bool:
    """Return whether a value can replace `op`: it has no nested blocks, state or random numbers."""
    return not (op.op_type.startswith(_UNFOLDABLE_PREFIXES) or op.blocks or is_opaque(op) or not op.outputs)


def is_compile_time_constant(op: Operation, max_bytes: float) -> bool:
    """Return whether all outputs of `op` are known, are the same wherever computed, and have at most `max_bytes`.

    Integers and bools qualify. Floats qualify where they are only moved, or are integers that a float represents
    exactly.
    """
    if not _is_foldable(op):
        return False
    if any(get_type_info(var).shape is None or get_constant_value(var) is None for var in op.outputs):
        return False
    return count_output_bytes(op) <= max_bytes and all(_is_reproducible(op, var) for var in op.outputs)


def _is_reproducible(op: Operation, var: Var) -> bool:
    """Return whether output `var` of `op` has the same bits wherever it is computed from the same operands."""
    return not types.is_float(var.dtype) or op.op_type in _EXACT_OPS or _is_exact_cast(op)


def _is_exact_cast(op: Operation) -> bool:
    if op.op_type != "cast":
        return False
    before, after = np.asarray(op.x.val), np.asarray(op.outputs[0].val)
    return bool(np.array_equal(before.astype(np.float64), after.astype(np.float64)))


class Float64Values:
    """Values of compile-time constants with all floats computed in double precision.

    A value that is only moved, or an integer, may still depend on a float that was rounded to its dtype before.
    """

    def __init__(self) -> None:
        self._values: dict[Var, Any] = {}

    def are_exact_in_float64(self, op: Operation) -> bool:
        """Return whether all outputs of `op` are the same in double precision."""
        return all(self._is_stored_value(var, self._compute_float64(var)) for var in op.outputs)

    def _compute_float64(self, var: Var) -> Any:
        """Return the value of `var` in double precision, None where it cannot be computed."""
        pending = [var]
        while pending:
            missing = [each for each in self._get_operands(pending[-1]) if each not in self._values]
            if not missing:
                last = pending.pop()
                self._values[last] = self._compute_from_operands(last)
            pending += missing
        return self._values[var]

    @staticmethod
    def _get_operands(var: Var) -> list[Var]:
        """Return the values that `var` is computed from; of a value that is not a constant only the shape is read."""
        if var.op is None or var.op.op_type in ("const", "shape"):
            return []
        return [each for each in get_flat_inputs(var.op) if each.val is not None]

    def _compute_from_operands(self, var: Var) -> Any:
        op, operands = var.op, self._get_operands(var)
        if op is None or op.op_type == "const":
            return var.val
        if get_constant_value(var) is None or any(self._values[each] is None for each in operands):
            return None
        if op.op_type in _FLOAT_ARITHMETIC and types.is_float(var.dtype):
            numbers = [self._values.get(op.inputs[name]) for name in ("x", "y") if op.inputs.get(name) is not None]
            if any(each is None for each in numbers):
                return None
            with np.errstate(all="ignore"):
                return _FLOAT_ARITHMETIC[op.op_type](*(np.asarray(each, np.float64) for each in numbers))
        if op.op_type == "cast" and types.is_int(var.dtype) and op.x in self._values:
            return np.trunc(self._values[op.x])
        same = all(self._is_stored_value(each, self._values[each]) for each in operands)
        return var.val if same and _is_reproducible(op, var) else None

    @staticmethod
    def _is_stored_value(var: Var, value: Any) -> bool:
        """Return whether the `value` of `var` in double precision is the one that coremltools has inferred."""
        if value is var.val or value is None:
            return value is not None
        return bool(np.array_equal(value, var.val, equal_nan=types.is_float(var.dtype)))


def count_output_bytes(op: Operation) -> int:
    """Count the bytes of the outputs of `op` whose sizes are fixed."""
    return sum(int(np.prod(get_type_info(var).shape or (), dtype=np.int64)) * get_itemsize(var) for var in op.outputs)
