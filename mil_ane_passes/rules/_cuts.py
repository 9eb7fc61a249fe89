"""Where a model is cut so that an op that leaves the ANE stands in a part of its own."""

from __future__ import annotations

from coremltools.converters.mil.mil import Function, Operation, Var

from ..core.query import flat_inputs, used

__all__ = ["COMMAND", "cuts"]

COMMAND = "`mil-ane-passes edit IN -o OUT --split-at VALUE`"
"Makes two packages of one, cut behind VALUE."


def cuts(op: Operation) -> str:
    """The values to cut at before and behind `op`, for a note; empty where nothing can be cut there.

    Both take two cuts, the one behind it first: the part that is cut off before it still has the value.
    """
    if not isinstance(op.enclosing_block, Function):
        return ""
    before = [var.name for var in dict.fromkeys(flat_inputs(op)) if _computed(var)][:1]
    behind = [var.name for var in op.outputs if used(var) and not var.consuming_blocks][:1]
    named = [f"{where} at '{name}'" for where, names in (("before it", before), ("behind it", behind))
             for name in names]
    return f"; to cut it out with --split-at: {', '.join(named)}" if named else ""


def _computed(var: Var) -> bool:
    """Whether `var` depends on the model's inputs, and is none of them."""
    return var.op is not None and not var.is_descendant_of_const and isinstance(var.op.enclosing_block, Function)
