"""Dependencies between ops: names read through nested blocks, effects of ops, and ops that no other needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from .program_parts import Block, Op

__all__ = ["find_dead_ops", "get_read_names", "has_effects", "is_pure", "remove_dead_ops", "rename_reads"]

_EFFECT_PATTERN = re.compile(r"write_state|coreml_update_state|print|random_|list_|make_list|tensor_array|custom")
"Types of coremltools' ops that have side effects, or may have."


def get_read_names(op: Op) -> set[str]:
    """Return the outer names that an op needs: its own inputs and those that its nested blocks capture."""
    found = set(op.arguments)
    for block in op.blocks:
        found |= _collect_captured_names(block)
    return found


def _collect_captured_names(block: Block) -> set[str]:
    found: set[str] = set()
    own = {declared.name for declared in block.inputs}
    for op in block.ops:
        found |= get_read_names(op) - own  # a value of the block shadows an outer name only in later ops
        own.update(op.outputs)
    return found | (set(block.outputs) - own)


def rename_reads(op: Op, names: Mapping[str, str]) -> Op:
    """Return the op with the names that it reads replaced by `names` (old to new), also in blocks unless shadowed."""
    op = op.with_arguments(names)
    blocks = op.blocks
    for block in blocks:
        shown = {old: new for old, new in names.items() if old not in {each.name for each in block.inputs}}
        for place, inner in enumerate(block.ops):
            block.ops[place] = rename_reads(inner, shown)
            shown = {old: new for old, new in shown.items() if old not in inner.outputs}
        block.outputs = [shown.get(name, name) for name in block.outputs]
    return op.with_blocks(blocks) if blocks else op


def is_pure(op: Op) -> bool:
    """Return whether an op is known to have no side effects: it can be removed when nothing reads its outputs."""
    return not has_effects(op.type) and all(is_pure(inner) for block in op.blocks for inner in block.ops)


def has_effects(op_type: str) -> bool:
    """Return whether ops of a type have side effects, or may, as types unknown to coremltools do."""
    return op_type not in SSAOpRegistry.core_ops or _EFFECT_PATTERN.match(op_type) is not None


def find_dead_ops(block: Block, roots: Iterable[Op] = ()) -> set[Op]:
    """Return the ops of a function's block that neither its outputs, nor `roots`, nor ops not known to be pure need."""
    needed, kept = set(block.outputs), set(roots)
    dead: set[Op] = set()
    for op in reversed(block.ops):
        if op in kept or not needed.isdisjoint(op.outputs) or not is_pure(op):
            needed |= get_read_names(op)
        else:
            dead.add(op)
    return dead


def remove_dead_ops(block: Block, before: set[Op]) -> list[Op]:
    """Remove unneeded ops, except for those in `before`, which were unneeded from the start.

    Returns the removed ops.
    """
    gone = find_dead_ops(block, before)
    dropped = [op for op in block.ops if op in gone]
    block.ops = [op for op in block.ops if op not in gone]
    return dropped
