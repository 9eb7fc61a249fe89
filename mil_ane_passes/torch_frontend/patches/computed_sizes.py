"""A size that is computed from another and read by several ops: the pass that moves an expand_dims before it.

coremltools' `rank0_expand_dims_swap` rebuilds the other ops that read the product of a size and a constant, but not
those that read it among several values, such as a concat of the sizes for a reshape: "Cannot delete op 'h' with active
output". It also rebuilds only the first output of an op. Here these ops stay and read a squeeze.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, types

from ...passes.examples import build_program
from ..contract import Patch

PATCH = Patch(code="TORCH186", title="a computed size that both a concat and an expand_dims read makes a pass fail",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    """Read half of a size by an expand_dims and by a concat."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    def build(x: Any) -> Any:
        half = mb.floor_div(x=mb.gather(x=mb.shape(x=x), indices=1, axis=0), y=2)
        sizes = mb.concat(values=[half, half], axis=0)
        return mb.add(x=mb.expand_dims(x=half, axes=[0]), y=sizes)

    program = build_program(build, dtype=types.fp32, x=(2, None))
    try:
        PASS_REGISTRY["common::rank0_expand_dims_swap"](program)
    except ValueError as error:
        return f"fails: {str(error).split(':')[0]}"
    return None


@PATCH.replace_function("coremltools.converters.mil.mil.passes.defs.optimize_elementwise_binary",
                        "rank0_expand_dims_swap._try_to_transform")
def move_expand_dims(host: Callable[..., Any], op: Operation, block: Any) -> Any:
    """Move an expand_dims before `op`, an elementwise op of rank 0; returns whether it was moved."""
    result = op.outputs[0]
    moved = [child for child in result.child_ops if child.op_type == "expand_dims"]
    others = [child for child in result.child_ops if child not in moved]
    is_rebuilt = all(len(child.outputs) == 1 and result in child.inputs.values() and child.enclosing_block == block
                     for child in others)
    if is_rebuilt or op.x.rank or op.y.rank or len(moved) != 1:
        return host(op, block)
    expanded, = moved
    if (op.x.val is None) == (op.y.val is None) or expanded.enclosing_block != block or result in block.outputs or (
            np.ravel(expanded.axes.val).tolist() != [0]):
        return False
    x, y = (mb.expand_dims(x=each, axes=[0], before_op=op) for each in (op.x, op.y))
    made = getattr(mb, op.op_type)(x=x, y=y, name=expanded.outputs[0].name, before_op=op)
    squeezed = mb.squeeze(x=made, axes=[0], before_op=op)
    block.replace_uses_of_var_after_op(anchor_op=expanded, old_var=expanded.outputs[0], new_var=made)
    block.replace_uses_of_var_after_op(anchor_op=op, old_var=result, new_var=squeezed)
    block.remove_ops([expanded, op])
    return True
