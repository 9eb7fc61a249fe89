"""Where a model is cut so that an op that is unsupported on the ANE stands in a part of its own."""

from __future__ import annotations

from collections.abc import Sequence

from coremltools.converters.mil.mil import Function, Operation, Var

from ..core.query import get_flat_inputs, is_used

__all__ = ["describe_split_points", "find_split_points"]

SplitPoints = Sequence[Sequence[str]]


def find_split_points(op: Operation) -> SplitPoints:
    """The values to cut at behind and before `op`, in the order in which the cuts are made; see `Hit.split_at`.

    The cut behind `op` comes first: its first part still has the value to cut at before `op`. Empty where nothing can
    be cut there.
    """
    if not isinstance(op.enclosing_block, Function):
        return ()
    behind = [var.name for var in op.outputs if is_used(var) and not var.consuming_blocks][:1]
    return tuple((name,) for name in (*behind, *_find_value_to_split_before(op)))


def describe_split_points(op: Operation) -> str:
    """The cuts of `find_split_points(op)` for a note, or an empty string."""
    before = _find_value_to_split_before(op)
    named = [
        f"{'before' if [name] == before else 'behind'} it at '{name}'" for (name,) in reversed(find_split_points(op))
    ]
    return f"; to cut it out with --split-at: {', '.join(named)}" if named else ""


def _find_value_to_split_before(op: Operation) -> list[str]:
    return [var.name for var in dict.fromkeys(get_flat_inputs(op)) if _is_computed(var)][:1]


def _is_computed(var: Var) -> bool:
    """Whether `var` depends on the model's inputs and is not one of them."""
    return var.op is not None and not var.is_descendant_of_const and isinstance(var.op.enclosing_block, Function)
