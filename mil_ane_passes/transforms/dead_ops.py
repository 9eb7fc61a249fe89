"""Ops on which no output depends: their search and removal. Ops that may have side effects are kept."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from coremltools.converters.mil.mil import Function, Operation, Var
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from ..ir.block_editor import BlockEditor
from ..ir.query import get_flat_inputs, iterate_nested_ops, plain_type
from ..package.origin import get_origin

__all__ = ["find_dead_ops", "find_unread_updates", "get_read_vars", "has_effects", "is_pure", "remove_dead_ops"]

_EFFECT_PATTERN = re.compile(r"write_state|coreml_update_state|print|random_|list_|make_list|tensor_array|custom")
"Types of coremltools' ops that have side effects or may have them."


def get_read_vars(op: Operation) -> set[Var]:
    """Return the vars that an op and its nested blocks read, including those made inside these blocks."""
    found = set(get_flat_inputs(op))
    for block in op.blocks:
        found.update(block.outputs, *map(get_flat_inputs, iterate_nested_ops(block)))
        found.update(var for inner in iterate_nested_ops(block) for each in inner.blocks for var in each.outputs)
    return found


def has_effects(op_type: str) -> bool:
    """Return whether ops of a type have side effects or may have them, such as types unknown to coremltools."""
    return op_type not in SSAOpRegistry.core_ops or _EFFECT_PATTERN.match(op_type) is not None


def is_pure(op: Operation) -> bool:
    """Return whether an op is known to have no side effects: it can be removed if nothing reads its outputs."""
    return not has_effects(plain_type(op)) and all(is_pure(inner) for block in op.blocks for inner in block.operations)


def find_dead_ops(function: Function) -> list[Operation]:
    """Return the ops of a function that are needed neither by its outputs nor by ops with side effects, users first."""
    needed, dead = set(function.outputs), []
    for op in reversed(list(function.operations)):
        if not needed.isdisjoint(op.outputs) or not is_pure(op):
            needed |= get_read_vars(op)
        else:
            dead.append(op)
    return dead


def find_unread_updates(function: Function) -> list[Operation]:
    """Return the writes of states whose read-back in the file is not needed."""
    return [op for op in iterate_nested_ops(function) if op.op_type == "coreml_update_state"
            and not (op.outputs[0].child_ops or op.outputs[0].consuming_blocks)
            and (origin := get_origin(op)) is not None and origin.names]


def remove_dead_ops(function: Function, before: Collection[Operation]) -> list[Operation]:
    """Remove unneeded ops, except for ops in `before`, which were already unneeded, and the ops that these need.

    Returns the removed ops (without consts that are not in the file) and the state writes that are no longer read back.
    """
    needed: set[Var] = set()
    gone = []
    for op in find_dead_ops(function):
        if op in before or not needed.isdisjoint(op.outputs):
            needed |= get_read_vars(op)
        else:
            gone.append(op)
    with BlockEditor() as editor:
        editor.remove(gone)
    unread = [op for op in find_unread_updates(function) if op not in before]
    for op in unread:
        op.origin = replace(op.origin, parts=op.origin.parts[:1], names=())
    gone = [*unread, *gone]
    return [op for op in reversed(gone) if not getattr(op, "synthetic", False)]
