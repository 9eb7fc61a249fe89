"""What became constant when shapes were fixed: which ops are replaced by their values, and which nothing needs then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.backend.mil.load import should_use_weight_file
from coremltools.converters.mil.mil import Block, Function, Operation, Var, types

from ..package.origin import inputs_of, origin_of
from .uses import has_effects

__all__ = ["Fates", "fates_of"]

_INLINE_BYTES = 64 << 10
"A value of a type that weight files do not hold is written into the model file, up to this size."
_BLOB_BYTES = 32 << 20
"A larger one is left to be computed: a package should not grow by what its ops make in no time."


@dataclass
class Fates:
    """What becomes of the ops the file has: `values` are written out as consts, `kept` ops stay, the others go."""

    values: dict[Operation, list[Var]] = field(default_factory=dict)
    kept: set[Operation] = field(default_factory=set)


def fates_of(function: Function, version: int) -> Fates:
    """The fates of the ops of `function`.

    An op that was there for nothing before stays, as does one that does more than make its outputs, and one that makes
    an output of the function.
    """
    before = _needed(function, lambda var: False, set())
    moving, outputs = _depending(function), set(function.outputs)

    def is_value(var: Var) -> bool:
        return var in moving and var not in outputs and _fits(var, version)

    return _needed(function, is_value, _all_ops(function) - before.kept)


def _all_ops(block: Block) -> set[Operation]:
    found = {op for op in block.operations if origin_of(op) is not None}
    for op in list(found):
        for inner in op.blocks:
            found |= _all_ops(inner)
    return found


def _needed(function: Function, is_value: Callable[[Var], bool], always: set[Operation]) -> Fates:
    fates, needed = Fates(), set(function.outputs)

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
        for now in inputs_of(op).values():
            needed.update(now)

    visit(function)
    return fates


def _has_state(op: Operation) -> bool:
    return any(types.is_state(var.sym_type) for now in inputs_of(op).values() for var in now)


def _depending(function: Function) -> set[Var]:
    """The values that depend on the function's inputs, in value or in shape."""
    found: set[Var] = set(function.inputs.values())

    def visit(block: Block) -> bool:
        any_found = False
        for op in block.operations:
            inner = False
            for nested in op.blocks:
                found.update(nested.inputs)
                inner |= visit(nested)
            if inner or any(var in found for now in inputs_of(op).values() for var in now):
                found.update(op.outputs)
                any_found = True
        return any_found

    visit(function)
    return found


def _fits(var: Var, version: int) -> bool:
    """Whether the host knows the value of `var`, as its type says, and it is small enough to be written out."""
    value: Any = var.val if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type) else None
    if value is None or types.is_sub_byte(var.dtype) or var.dtype == types.str:
        return False
    array = np.asarray(value)
    if array.shape != tuple(var.shape) or array.dtype != np.dtype(types.nptype_from_builtin(var.dtype)):
        return False
    return bool(array.nbytes <= (_BLOB_BYTES if should_use_weight_file(array, version) else _INLINE_BYTES))
