"""Cloning of programs: the clone shares the weights with the original.

`copy.deepcopy` is not usable. It would copy the weights, and its recursion would be as deep as the program is long,
because pymil's objects refer to one another across the whole graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil import block as host_block
from coremltools.converters.mil.mil.types.symbolic import is_symbolic
from coremltools.converters.mil.mil.utils import CacheDoublyLinkedList

from ..utils.garbage_collection import pause_garbage_collection
from .coremltools_internals import is_evaluated_wrongly
from .query import get_flat_inputs
from .type_inference import infer_types, raise_not_evaluated, refine_type

__all__ = ["Rollback", "clone_function", "clone_op", "clone_program", "infer_outputs", "insert_op", "map_inputs"]

_LOADER_ATTRIBUTES = ("origin", "synthetic", "blob", "value_inference")
"Attributes that the loader sets on an op to refer to the op in the file."
_MAX_EVALUATED_BYTES = 1 << 16
"Values of more bytes are not evaluated, because that would read weights; shapes and indices are far smaller."


@pause_garbage_collection()
def clone_program(program: Program) -> Program:
    """Clone a program: ops and vars are new, const values and read-only data are shared."""
    clone = copy.copy(program)
    clone.functions = {name: clone_function(function) for name, function in program.functions.items()}
    return clone


class Rollback:
    """Restores the functions of a program from copies that were made before the changes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._kept: dict[str, Function] = {}
        self._attributes: dict[str, Any] | None = None
        self._open_blocks = len(host_block.BLOCK_STACK)

    def keep(self, name: str) -> None:
        """Copy the function `name` before it is changed; the weights are shared."""
        if name not in self._kept:
            self._kept[name] = clone_function(self._program.functions[name])

    def save_all_functions(self) -> None:
        """Copy all functions before the program is changed; the weights are shared."""
        self._attributes = {**vars(self._program), "functions": dict(self._program.functions)}
        for name in self._program.functions:
            self.keep(name)

    def restore(self) -> None:
        """Restore the saved functions, and close the blocks that an exception left open in coremltools."""
        if self._attributes is not None:
            vars(self._program).clear()
            vars(self._program).update(self._attributes)
        self._program.functions.update(self._kept)
        del host_block.BLOCK_STACK[self._open_blocks:]


def clone_function(function: Function) -> Function:
    """Clone a function: ops and vars are new, const values and read-only data are shared."""
    env: dict[Var, Var] = {}
    clone = copy.copy(function)
    clone.placeholder_inputs = {}
    clone._input_dict = type(function._input_dict)()
    for name, placeholder in function.placeholder_inputs.items():
        fresh = copy.copy(placeholder)
        fresh.outputs = [_clone_var(var, None, env) for var in placeholder.outputs]
        clone.placeholder_inputs[name] = fresh
        clone._input_dict[name] = fresh.outputs[0]
    _clone_block_contents(function, clone, env)
    return clone


def _clone_block_contents(block: Block, clone: Block, env: dict[Var, Var]) -> None:
    """Replace the ops and outputs of `clone`, a shallow copy of `block`, by clones."""
    clone.operations = CacheDoublyLinkedList([_clone_op(op, clone, env) for op in block.operations])
    clone._internal_vars = {env[var] for var in block._internal_vars if var in env}
    clone._essential_scope_sources = list(block._essential_scope_sources)
    clone._outputs = [env[var] for var in block.outputs]
    for var in dict.fromkeys(clone._outputs):
        var.consuming_blocks.append(clone)


def _clone_op(op: Operation, block: Block, env: dict[Var, Var]) -> Operation:
    clone = copy.copy(op)
    clone.enclosing_block = block
    clone.scopes = {source: list(names) for source, names in op.scopes.items()}
    clone._input_vars = {}
    for name, bound in op._input_vars.items():
        inputs = tuple(_get_operand_clone(var, env) for var in bound) if isinstance(bound, (list, tuple)) else (
            None if bound is None else _get_operand_clone(bound, env))
        clone._input_vars[name] = inputs
        setattr(clone, name, inputs)
        for var in inputs if isinstance(inputs, tuple) else [inputs] if inputs is not None else []:
            var.child_ops.append(clone)
    clone.blocks = []
    for inner in op.blocks:
        fresh = copy.copy(inner)
        fresh.outer_op = clone
        fresh._block_inputs = tuple(_clone_var(var, None, env) for var in inner.inputs)
        _clone_block_contents(inner, fresh, env)
        clone.blocks.append(fresh)
    clone._output_vars = [_clone_var(var, clone, env) for var in op.outputs]
    return clone


def _get_operand_clone(var: Var, env: dict[Var, Var]) -> Var:
    """Return the clone of an operand. Internal vars have no producer and are cloned here on first use."""
    return env[var] if var in env else _clone_var(var, None, env)


def _clone_var(var: Var, op: Operation | None, env: dict[Var, Var]) -> Var:
    clone = copy.copy(var)
    clone._op = op
    clone._child_ops = []
    clone.consuming_blocks = []
    env[var] = clone
    clone._nonreplaceable_vars_upstream = {env.get(up, up) for up in var.nonreplaceable_vars_upstream}
    return clone


def clone_op(op: Operation, inputs: Mapping[str, Any]) -> Operation:
    """Clone `op`, without a block or outputs, with the inputs of the names in `inputs` replaced.

    The producers of its inputs do not list it as a user until it is inserted.
    """
    clone = copy.copy(op)
    for name in _LOADER_ATTRIBUTES:
        clone.__dict__.pop(name, None)
    clone.enclosing_block, clone.blocks, clone._output_vars = None, [], None
    clone.scopes = {source: list(names) for source, names in op.scopes.items()}
    clone._input_vars = {**op._input_vars, **inputs}
    for name, var in op.internal_inputs.items():
        own = copy.copy(var)
        own._child_ops = [clone]
        clone._input_vars[name] = own
    for name, args in clone._input_vars.items():
        setattr(clone, name, args)
    return clone


def map_inputs(op: Operation, env: Mapping[Var, Var]) -> dict[str, Any]:
    """Return the inputs of `op` by name; vars that are keys of `env` are replaced by its values."""
    return {name: tuple(env.get(var, var) for var in bound) if isinstance(bound, (list, tuple)) else
            env.get(bound, bound) for name, bound in op.inputs.items()}


def infer_outputs(clone: Operation, like: Operation) -> Operation:
    """Infer the output types of `clone` from its inputs and create its outputs.

    Sizes known only for the outputs of `like` are kept, too.
    """
    built = infer_types(clone, [var.sym_type for var in like.outputs])
    built = built if isinstance(built, tuple) else (built,)
    if len(built) == len(like.outputs):
        built = tuple(refine_type(new, old.sym_type) for new, old in zip(built, like.outputs))

    def return_types() -> Any:
        return built

    clone.type_inference = return_types
    if is_evaluated_wrongly(clone) or any(_has_large_value(var) for var in get_flat_inputs(clone)) or any(
        _count_bytes(each) > _MAX_EVALUATED_BYTES for each in built
    ):
        clone.value_inference = raise_not_evaluated
    try:
        clone.type_value_inference()
    finally:
        del clone.type_inference
    return clone


def insert_op(op: Operation, block: Block, before: Operation | None) -> None:
    """Insert `op`, which is in no block, into `block` before the op `before`, or at its end."""
    for var in get_flat_inputs(op):
        var.add_child_op(op)
    for inner in op.internal_inputs.values():
        block.add_internal_var(inner)
    op.enclosing_block = block
    block._insert_op_before(op, before_op=before)


def _has_large_value(var: Var) -> bool:
    return var._sym_val is not None and _count_bytes(var.sym_type) > _MAX_EVALUATED_BYTES


def _count_bytes(sym_type: Any) -> int:
    """Return the bytes of a value of the type; symbolic dimensions count as 1."""
    if not types.is_tensor(sym_type):
        return 0
    elements = math.prod(int(size) for size in sym_type.get_shape() if not is_symbolic(size))
    return elements * int(np.dtype(types.nptype_from_builtin(sym_type.get_primitive())).itemsize)
