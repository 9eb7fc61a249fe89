"""Constant folding after shapes were fixed: ops that are replaced by their values, and ops that become unneeded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.backend.mil.load import should_use_weight_file
from coremltools.converters.mil.mil import Block, Function, Operation, Var, types

from ..package.origin import get_file_inputs, get_origin
from .uses import has_effects

__all__ = ["FoldPlan", "plan_folding"]

_MAX_INLINE_BYTES = 1 << 20
"The largest value written into the model file, for types that weight files do not hold: a mask of 1024 x 1024."
_MAX_BLOB_BYTES = 32 << 20
"The largest value written to a weight file: a package should not grow by values that its ops compute quickly."


_EXACT_OPS = frozenset((
    "abs", "add", "broadcast_to", "cast", "ceil", "clip", "concat", "cond", "const", "equal", "expand_dims", "fill",
    "fill_like", "floor", "gather", "gather_along_axis", "gather_nd", "identity", "maximum", "minimum", "mul",
    "one_hot", "pad", "real_div", "relu", "reshape", "reverse", "round", "select", "sign", "slice_by_index",
    "slice_by_size", "slice_update", "split", "sqrt", "squeeze", "stack", "sub", "tile", "transpose", "while_loop"))
"Ops that compute the same floats on every machine: they move them, or round the true result once."


@dataclass
class FoldPlan:
    """The plan for the ops of the file: `values` are written as consts, `kept` ops stay, the others are removed.

    `rounded` are the values that another machine may compute to other bits.
    """

    values: dict[Operation, list[Var]] = field(default_factory=dict)
    kept: set[Operation] = field(default_factory=set)
    rounded: set[Var] = field(default_factory=set)


def plan_folding(function: Function, version: int) -> FoldPlan:
    """Plan the folding of the ops of `function`.

    An op that was unneeded before stays, as does one with side effects, and one that makes an output of the function.
    """
    before = _classify_ops(function, lambda var: False, set())
    moving, outputs = _find_dependent_vars(function, lambda op: False, *function.inputs.values()), set(function.outputs)

    def is_value(var: Var) -> bool:
        return var in moving and var not in outputs and _can_be_written(var, version)

    fates = _classify_ops(function, is_value, _collect_file_ops(function) - before.kept)
    rounded = _find_dependent_vars(
        function, lambda op: op.op_type not in _EXACT_OPS and any(map(_is_float, op.outputs))
    )
    fates.rounded = {var for values in fates.values.values() for var in values if var in rounded}
    return fates


def _collect_file_ops(block: Block) -> set[Operation]:
    found = {op for op in block.operations if get_origin(op) is not None}
    for op in list(found):
        for inner in op.blocks:
            found |= _collect_file_ops(inner)
    return found


def _classify_ops(function: Function, is_value: Callable[[Var], bool], always: set[Operation]) -> FoldPlan:
    fates, needed = FoldPlan(), set(function.outputs)

    def visit(block: Block) -> None:
        for op in reversed(list(block.operations)):
            wanted = [var for var in op.outputs if var in needed]
            if wanted and op not in always and all(map(is_value, wanted)):
                fates.values[op] = wanted
            elif wanted or op in always or has_effects(op.op_type) or _has_state(op):
                keep(op)

    def keep(op: Operation) -> None:
        fates.kept.add(op)
        for inner in op.blocks:
            needed.update(inner.outputs)
            visit(inner)
        for now in get_file_inputs(op).values():
            needed.update(now)

    visit(function)
    return fates


def _has_state(op: Operation) -> bool:
    return any(types.is_state(var.sym_type) for now in get_file_inputs(op).values() for var in now)


def _find_dependent_vars(function: Function, begins: Callable[[Operation], bool], *given: Var) -> set[Var]:
    """Return the values that depend on those `given`, in value or in shape, or on an op for which `begins` is true."""
    found: set[Var] = set(given)

    def visit(block: Block) -> bool:
        any_found = False
        for op in block.operations:
            inner = begins(op) and any(var.val is not None for var in op.outputs)
            for nested in op.blocks:
                if given:
                    found.update(nested.inputs)
                inner |= visit(nested)
            if inner or any(var in found for now in get_file_inputs(op).values() for var in now):
                found.update(op.outputs)
                any_found = True
        return any_found

    visit(function)
    return found


def _is_float(var: Var) -> bool:
    return bool(types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) and bool(types.is_float(var.dtype))


def _can_be_written(var: Var, version: int) -> bool:
    """Return whether coremltools knows the value of `var`, as its type declares, and it is small enough to write."""
    value: Any = var.val if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type) else None
    if value is None or types.is_sub_byte(var.dtype) or var.dtype == types.str:
        return False
    array = np.asarray(value)
    if array.shape != tuple(var.shape) or array.dtype != np.dtype(types.nptype_from_builtin(var.dtype)):
        return False
    return bool(array.nbytes <= (_MAX_BLOB_BYTES if should_use_weight_file(array, version) else _MAX_INLINE_BYTES))
