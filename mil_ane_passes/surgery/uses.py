"""What needs what: names read through nested blocks, ops that nothing needs any more, names that are free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from .program_parts import Block, Op

__all__ = ["find_dead_ops", "get_read_names", "has_effects", "is_pure", "remove_dead_ops", "rename_reads"]

_EFFECT_PATTERN = re.compile(r"write_state|coreml_update_state|print|random_|list_|make_list|tensor_array|custom")
"Ops coremltools knows that do more than make their outputs, or may."


def get_read_names(op: Op) -> set[str]:
    """The names from outside that an op needs: its own inputs and what its nested blocks capture."""
    found = set(op.arguments)
    for block in op.blocks:
        found |= _collect_captured_names(block)
    return found


def _collect_captured_names(block: Block) -> set[str]:
    found: set[str] = set()
    own = {declared.name for declared in block.inputs}
    for op in block.ops:
        found |= get_read_names(op) - own  # what the block makes further on hides an outer name only from there
        own.update(op.outputs)
    return found | (set(block.outputs) - own)


def rename_reads(op: Op, names: Mapping[str, str]) -> Op:
    """The op with other names read, as `names` says (old to new); in nested blocks too, where they are not hidden."""
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
    """Whether an op is known to do nothing but make its outputs: then it can go when nothing reads them."""
    return not has_effects(op.type) and all(is_pure(inner) for block in op.blocks for inner in block.ops)


def has_effects(op_type: str) -> bool:
    """Whether ops of a type do more than make their outputs, or may: coremltools does not know them then."""
    return op_type not in SSAOpRegistry.core_ops or _EFFECT_PATTERN.match(op_type) is not None


def find_dead_ops(block: Block, roots: Iterable[Op] = ()) -> set[Op]:
    """The ops of a function's block that its outputs, `roots` and all that is not known to be pure do not need."""
    needed, kept = set(block.outputs), set(roots)
    dead: set[Op] = set()
    for op in reversed(block.ops):
        if op in kept or not needed.isdisjoint(op.outputs) or not is_pure(op):
            needed |= get_read_names(op)
        else:
            dead.add(op)
    return dead


def remove_dead_ops(block: Block, before: set[Op]) -> list[Op]:
    """Removes the ops nothing needs; those in `before`, which nothing needed all along, stay. Returns what went."""
    gone = find_dead_ops(block, before)
    dropped = [op for op in block.ops if op in gone]
    block.ops = [op for op in block.ops if op not in gone]
    return dropped
