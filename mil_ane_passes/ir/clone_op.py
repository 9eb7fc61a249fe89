"""Cloning of one op onto other inputs: no parameter is dropped or rewritten, types and values are inferred again.

pymil's builder would fill in defaults, promote types and pick the newest version of the op; a clone keeps its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from .query import get_flat_inputs
from .type_inference import infer_types, raise_not_evaluated, refine_type

__all__ = ["clone_op", "infer_outputs", "insert_op", "map_inputs"]

_LOADER_ATTRIBUTES = ("origin", "synthetic", "blob", "value_inference")
"Attributes that the loader sets on an op to refer to the op in the file."
_MAX_EVALUATED_BYTES = 1 << 16
"Values larger than this are not evaluated, because that would read weights."


def clone_op(op: Operation, inputs: Mapping[str, Any]) -> Operation:
    """Clone `op`, without a block or outputs, with `inputs` replacing its own inputs of those names.

    The producers of its inputs do not list it as a user until it is inserted.
    """
    twin = copy.copy(op)
    for name in _LOADER_ATTRIBUTES:
        twin.__dict__.pop(name, None)
    twin.enclosing_block, twin.blocks, twin._output_vars = None, [], None
    twin.scopes = {source: list(names) for source, names in op.scopes.items()}
    twin._input_vars = {**op._input_vars, **inputs}
    for name, var in op.internal_inputs.items():
        own = copy.copy(var)
        own._child_ops = [twin]
        twin._input_vars[name] = own
    for name, given in twin._input_vars.items():
        setattr(twin, name, given)
    return twin


def map_inputs(op: Operation, env: Mapping[Var, Var]) -> dict[str, Any]:
    """Return the inputs of `op` by name, replaced by their vars in `env` where it has them."""
    return {name: tuple(env.get(var, var) for var in bound) if isinstance(bound, (list, tuple)) else
            env.get(bound, bound) for name, bound in op.inputs.items()}


def infer_outputs(twin: Operation, like: Operation) -> Operation:
    """Infer the output types of `twin` from its inputs and create its outputs.

    Sizes known only for the outputs of `like` are kept, too.
    """
    made = infer_types(twin)
    made = made if isinstance(made, tuple) else (made,)
    if len(made) == len(like.outputs):
        made = tuple(refine_type(new, old.sym_type) for new, old in zip(made, like.outputs))

    def known() -> Any:
        return made

    twin.type_inference = known
    if any(_has_large_value(var) for var in get_flat_inputs(twin)) or any(
        _count_bytes(each) > _MAX_EVALUATED_BYTES for each in made
    ):
        twin.value_inference = raise_not_evaluated
    try:
        twin.type_value_inference()
    finally:
        del twin.type_inference
    return twin


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
