"""Check that values are defined before their use; pymil's own check is quadratic in shared consts."""

from __future__ import annotations

from collections.abc import Container, Iterable

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ..utils.errors import RuleError

__all__ = ["check_op_order"]


def check_op_order(
    block: Block, written: Container[Operation] | None = None, visible: set[Var] | None = None, who: str = ""
) -> None:
    """Raise RuleError if an op of `block` uses a value that is defined later, or nowhere: Core ML would reject that.

    `written` limits the check to those ops; `who` names the rule that is being checked. Linear in the number of ops.
    """
    visible = set() if visible is None else visible
    made = set(block.inputs.values() if isinstance(block, Function) else block.inputs) - visible
    visible |= made
    visible |= block._internal_vars
    for op in block.operations:
        if written is None or op in written:
            for inner in op.blocks:
                check_op_order(inner, written, visible, who)
            _check_visible(op.get_flattened_inputs(), f"{who}op {op.name!r} uses", visible)
        made.update(op.outputs)
        visible.update(op.outputs)
    _check_visible(block.outputs, f"{who}block {block.name!r} returns", visible)
    visible -= made


def _check_visible(used: Iterable[Var], who: str, visible: set[Var]) -> None:
    for var in used:
        if var not in visible:
            raise RuleError(
                f"{who} {var.name!r}, which no op before it makes; expected the ops in the order of their use: "
                "the rule that put it there has to set the place"
            )
