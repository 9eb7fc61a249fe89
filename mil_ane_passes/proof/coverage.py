"""Which functions and nested blocks of two programs differ although no run entered them: nothing is proved there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program

from ..core.printer import block_text

__all__ = ["Place", "blocks_not_entered", "blocks_of"]

Place = tuple[str, ...]
"Where a block is: the function, and for each level the op's first output and the block's number."


def blocks_not_entered(before: Program, after: Program, seen_before: set[Block], seen_after: set[Block]) -> list[str]:
    """The places of functions and blocks that differ (or are new) and that the runs of either program never entered."""
    old, new = dict(_nested(before)), dict(_nested(after))
    return [
        " > ".join(place) for place, block in new.items()
        if (place not in old or _differ(old[place], block))
        and (block not in seen_after or (place in old and old[place] not in seen_before))
    ]


def _nested(program: Program) -> Iterator[tuple[Place, Block]]:
    """Every function and every nested block under its place."""
    for name, function in program.functions.items():
        yield from blocks_of(name, function)


def blocks_of(name: str, function: Function) -> Iterator[tuple[Place, Block]]:
    """The function called `name` and every block nested in it, each under its place, outer blocks first."""
    pending: list[tuple[Place, Block]] = [((name,), function)]
    while pending:
        place, block = pending.pop()
        yield place, block
        for op in block.operations:
            pending += [((*place, f"block {number} of {op.op_type} '{_name(op)}'"), inner)
                        for number, inner in enumerate(op.blocks)]


def _name(op: Operation) -> str:
    return str(op.outputs[0].name) if op.outputs else str(op.name)


def _differ(one: Block, other: Block) -> bool:
    if block_text(one) != block_text(other):
        return True
    return not all(_equal(a, b) for a, b in zip(_consts(one), _consts(other)))


def _consts(block: Block) -> list[Operation]:
    return [op for op in block.operations if op.op_type == "const"]


def _equal(one: Operation, other: Operation) -> bool:
    """Whether two consts hold the same; the text shows large ones by type only."""
    if one.outputs[0]._sym_val is other.outputs[0]._sym_val:
        return True
    values = [np.asarray(op.outputs[0].val) for op in (one, other)]
    return bool(np.array_equal(values[0], values[1], equal_nan=values[0].dtype.kind == "f"))
