"""The same op once more on other inputs: no parameter is left out or written anew, types and values are inferred anew.

pymil's builder would fill in defaults, promote types and take the newest form of the opset; a copy stays what it was.
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
"What the loader notes at an op about the one in the file."
_MAX_EVALUATED_BYTES = 1 << 16
"Values of more bytes are not asked for: that would read weights."


def clone_op(op: Operation, inputs: Mapping[str, Any]) -> Operation:
    """`op` once more, in no block and without outputs: with `inputs` in place of its own of those names.

    What it reads does not know of it until it is inserted.
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
    """The inputs of `op` by name, with the vars that `env` has for them."""
    return {name: tuple(env.get(var, var) for var in bound) if isinstance(bound, (list, tuple)) else
            env.get(bound, bound) for name, bound in op.inputs.items()}


def infer_outputs(twin: Operation, like: Operation) -> Operation:
    """`clone` with outputs, of the types that follow from its inputs; sizes that only those of `like` know hold,
    too."""
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
    """Put `op`, which stands in no block, into `block` before the op `before`, or at its end."""
    for var in get_flat_inputs(op):
        var.add_child_op(op)
    for inner in op.internal_inputs.values():
        block.add_internal_var(inner)
    op.enclosing_block = block
    block._insert_op_before(op, before_op=before)


def _has_large_value(var: Var) -> bool:
    return var._sym_val is not None and _count_bytes(var.sym_type) > _MAX_EVALUATED_BYTES


def _count_bytes(sym_type: Any) -> int:
    """Bytes of a value of the type, as far as they are known."""
    if not types.is_tensor(sym_type):
        return 0
    elements = math.prod(int(size) for size in sym_type.get_shape() if not is_symbolic(size))
    return elements * int(np.dtype(types.nptype_from_builtin(sym_type.get_primitive())).itemsize)
