"""Regions of a block that can be run on padded rows: where they begin, what they make, where they end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from coremltools.converters.mil.mil import Block, Operation, Var

from ..core.groups import sharing
from ..core.query import consumers
from ._row_steps import step_of
from ._rows import Rows, Step

__all__ = ["RowRegion", "row_regions"]


@dataclass
class RowRegion:
    """Ops that hang together by padded values. `steps` in block order; `enters` are values that get a pad, `leaves`
    those that get a slice."""

    steps: dict[Operation, Step] = field(default_factory=dict)
    enters: list[Var] = field(default_factory=list)
    leaves: list[Var] = field(default_factory=list)

    @property
    def moves(self) -> int:
        return len(self.enters) + len(self.leaves)

    @property
    def values(self) -> list[Var]:
        """All that is padded, consts aside."""
        return list(dict.fromkeys(var for step in self.steps.values() for var in (*step.takes, *step.gives)))


def row_regions(block: Block, rows: Rows, max_bytes: int, refused: dict[Operation, int]) -> Iterator[RowRegion]:
    """The regions of one block; linear in its ops. `refused` gets the ops whose constants would exceed `max_bytes`."""
    reaches: dict[Var, float] = {}
    steps: dict[Operation, Step] = {}
    for op in block.operations:
        step = None if op.op_type == "const" else step_of(op, rows, reaches)
        if step is None:
            if op.op_type != "const":
                rows.note_refused(op)
        elif step.constants > max_bytes:
            refused[op] = step.constants
        else:
            steps[op] = step
            reaches.update(dict.fromkeys(step.gives, step.reach))
    for members in sharing({op: (*step.takes, *step.gives) for op, step in steps.items()}):
        region = RowRegion({op: steps[op] for op in members})
        made = {var for op in members for var in steps[op].gives}
        region.enters = [var for var in region.values if var not in made]
        region.leaves = [var for var in region.values if var in made and _needed_narrow(var, region.steps)]
        yield region


def _needed_narrow(var: Var, steps: dict[Operation, Step]) -> bool:
    """Whether anything reads `var` as it is."""
    return bool(var.consuming_blocks) or any(
        reader not in steps or var not in steps[reader].takes or var in steps[reader].keeps
        for reader in consumers(var))
