"""Errors planted in a program: one op computes something else, of the same type and shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, Program, Var, types

from mil_ane_passes.ir.block_editor import BlockEditor
from mil_ane_passes.ir.clone import clone_op, clone_program, infer_outputs, insert_op
from mil_ane_passes.ir.query import get_const_value, is_const, iterate_nested_ops

__all__ = ["plant_error"]

_UNARY_OPS = ("abs", "cos", "exp", "floor", "identity", "relu", "sigmoid", "sin", "square", "tanh")
_EFFECTS = frozenset({"const", "read_state", "write_state", "coreml_update_state", "classify", "make_list"})
_SMALLEST_CHANGE = 10
"The binary digit of a constant that the smallest change is in: the last one of fp16."
_MAX_TRIES = 40


def plant_error(program: Program, random: np.random.Generator) -> tuple[Program, str] | None:
    """Return a copy of `program` with an error in one of its ops, and what it is; None where none can be planted."""
    clone = clone_program(program)
    ops = [op for function in clone.functions.values() for op in iterate_nested_ops(function) if _is_suitable(op)]
    if not ops:
        return None
    for _ in range(_MAX_TRIES):
        op = ops[int(random.integers(len(ops)))]
        changes = [*_iterate_changes(op, random)]
        if not changes:
            continue
        name, made = changes[int(random.integers(len(changes)))]
        label = f"{name} of {op.op_type} '{op.outputs[0].name}'"
        try:
            if _apply(op, made, random):
                return clone, label
        except (ValueError, TypeError, NotImplementedError, IndexError, AssertionError, AttributeError):
            return None  # pymil rejects it half way
    return None


def _is_suitable(op: Operation) -> bool:
    return not (op.op_type in _EFFECTS or op.op_type.startswith("constexpr_") or op.blocks) and len(
        op.outputs) == 1 and types.is_tensor(op.outputs[0].sym_type) and all(
            isinstance(var, (Var, tuple, list)) for var in op.inputs.values())


def _iterate_changes(op: Operation, random: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Yield what can be changed of an op: a name, and new inputs, another type, or None for its operand instead."""
    x, y = op.inputs.get("x"), op.inputs.get("y")
    for name, var in op.inputs.items():
        if isinstance(var, Var) and is_const(var):
            value = get_const_value(var)
            changed = _change_value(name, value, x, random)
            if changed is not None:
                yield f"another '{name}'", {name: changed}
    if isinstance(x, Var) and isinstance(y, Var) and x is not y:
        yield "exchanged operands", {"x": y, "y": x}
    if isinstance(x, Var) and not is_const(x) and _has_type_of(x, op.outputs[0]):
        yield "lack", None
        if set(op.inputs) <= {"x", "epsilon", "alpha", "beta"} and types.is_float(x.dtype):
            other = _UNARY_OPS[int(random.integers(len(_UNARY_OPS)))]
            if other != op.op_type:
                yield f"'{other}' in place", other
    values = op.inputs.get("values")
    if isinstance(values, (list, tuple)) and len(values) > 1 and values[0] is not values[-1]:
        yield "exchanged operands", {"values": (*values[1:], values[0])}


def _change_value(name: str, value: Any, x: Any, random: np.random.Generator) -> Any:
    """Return a constant with one element changed, or another choice of a parameter; None where there is none."""
    if isinstance(value, (bool, np.bool_)):
        return np.bool_(not value)
    array = np.array(value)
    if name in ("axis", "axes") and isinstance(x, Var) and x.rank and array.size == 1:
        return np.full(array.shape, int(random.integers(x.rank)), np.int32)
    if name == "perm":
        return np.int32(random.permutation(array))
    if not array.size or array.dtype.kind not in "fiu":
        return None
    flat = array.reshape(-1).copy()
    at = int(random.integers(flat.size))
    if array.dtype.kind == "f":
        way = int(random.integers(3))
        factor = 1 + 2.0 ** -float(random.integers(1, _SMALLEST_CHANGE + 1))
        flat[at] = -flat[at] if way == 0 else flat[at] * factor if way == 1 else flat[at] + 1
    else:
        flat[at] += 1 if random.random() < 0.5 or flat[at] == 0 else -1
    return flat.reshape(array.shape) if isinstance(value, np.ndarray) else flat[0]


def _has_type_of(one: Var, other: Var) -> bool:
    return bool(types.is_tensor(one.sym_type)) and one.dtype == other.dtype and tuple(one.shape) == tuple(other.shape)


def _apply(op: Operation, made: Any, random: np.random.Generator) -> bool:
    """Put the changed op in the place of `op`; returns whether its result has the same type."""
    block, old = op.enclosing_block, op.outputs[0]
    if made is None:
        new = op.inputs["x"]
        if block in old.consuming_blocks and new.op is None:
            return False  # pymil returns no inputs
    elif isinstance(made, str):
        with block:
            new = getattr(mb, made)(x=op.inputs["x"], before_op=op)
    else:
        inputs = {}
        with block:
            for name, value in made.items():
                inputs[name] = value if isinstance(value, (Var, tuple)) else mb.const(val=value, before_op=op)
        try:
            clone = infer_outputs(clone_op(op, inputs), op)
        except OverflowError:  # a range with a step of 0
            return False
        insert_op(clone, block, op)
        new = clone.outputs[0]
    if not _has_type_of(new, old):
        with BlockEditor() as editor:
            editor.remove_if_unused([new.op] if made is not None else [])
        return False
    name = old.name
    with BlockEditor() as editor:
        editor.replace(old, new)
        editor.remove_if_unused([op])
    if made is not None and random.random() < 0.5:  # its value is compared with the one of that name
        new.name = name
    return True
