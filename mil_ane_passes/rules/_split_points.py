"""Split points of a model, which put an op that is unsupported on the ANE into a part of its own."""

from __future__ import annotations

from collections.abc import Sequence

from coremltools.converters.mil.mil import Function, Operation, Var

from ..ir.query import get_flat_inputs, is_used

__all__ = ["describe_split_points", "find_split_points"]

SplitPoints = Sequence[Sequence[str]]


def find_split_points(op: Operation) -> SplitPoints:
    """Return the values to split at after and before `op`, in the order of the splits; see `Hit.split_at`.

    The split after `op` comes first: its first part still has the value to split at before `op`. Empty where no split
    is possible there.
    """
    if not isinstance(op.enclosing_block, Function):
        return ()
    behind = [var.name for var in op.outputs if is_used(var) and not var.consuming_blocks][:1]
    return tuple((name,) for name in (*behind, *_find_value_to_split_before(op)))


def describe_split_points(op: Operation) -> str:
    """Format the splits of `find_split_points(op)` for a note, or return ""."""
    before = _find_value_to_split_before(op)
    named = [
        f"{'before' if [name] == before else 'behind'} it at '{name}'" for (name,) in reversed(find_split_points(op))
    ]
    return f"; to cut it out with --split-at: {', '.join(named)}" if named else ""


def _find_value_to_split_before(op: Operation) -> list[str]:
    return [var.name for var in dict.fromkeys(get_flat_inputs(op)) if _is_computed(var)][:1]


def _is_computed(var: Var) -> bool:
    """Return whether `var` depends on the model's inputs and is not one of them."""
    return var.op is not None and not var.is_descendant_of_const and isinstance(var.op.enclosing_block, Function)
