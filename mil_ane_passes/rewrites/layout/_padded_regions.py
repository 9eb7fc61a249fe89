"""Regions of a block that can run on padded rows: their inputs, ops and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from coremltools.converters.mil.mil import Block, Operation, Var

from ...ir.op_groups import group_by_shared_values
from ...ir.query import get_consumers
from ._padded_ops import plan_padded_op
from ._row_padding import PaddedStep, RowPadding

__all__ = ["PaddedRegion", "iterate_padded_regions"]


@dataclass
class PaddedRegion:
    """Ops connected by padded values: `steps` in block order.

    `padded_values` are padded where they enter, `sliced_values` sliced where they leave.
    """

    steps: dict[Operation, PaddedStep] = field(default_factory=dict)
    padded_values: list[Var] = field(default_factory=list)
    sliced_values: list[Var] = field(default_factory=list)

    @property
    def moves(self) -> int:
        return len(self.padded_values) + len(self.sliced_values)

    @property
    def values(self) -> list[Var]:
        """All padded values, except consts."""
        return list(dict.fromkeys(var for step in self.steps.values() for var in (*step.takes, *step.padded_outputs)))


def iterate_padded_regions(
    block: Block, rows: RowPadding, max_bytes: int, refused: dict[Operation, int]
) -> Iterator[PaddedRegion]:
    """Yield the regions of one block; linear in its ops.

    `refused` collects the ops whose constants would exceed `max_bytes`.
    """
    reaches: dict[Var, float] = {}
    steps: dict[Operation, PaddedStep] = {}
    for op in block.operations:
        step = None if op.op_type == "const" else plan_padded_op(op, rows, reaches)
        if step is None:
            if op.op_type != "const":
                rows.note_unpadded(op)
        elif step.constants > max_bytes:
            refused[op] = step.constants
        else:
            steps[op] = step
            reaches.update(dict.fromkeys(step.padded_outputs, step.reach))
    for members in group_by_shared_values({op: (*step.takes, *step.padded_outputs) for op, step in steps.items()}):
        region = PaddedRegion({op: steps[op] for op in members})
        made = {var for op in members for var in steps[op].padded_outputs}
        region.padded_values = [var for var in region.values if var not in made]
        region.sliced_values = [var for var in region.values if var in made and _is_needed_unpadded(var, region.steps)]
        yield region


def _is_needed_unpadded(var: Var, steps: dict[Operation, PaddedStep]) -> bool:
    """Return whether anything reads `var` without padding."""
    return bool(var.consuming_blocks) or any(
        reader not in steps or var not in steps[reader].takes or var in steps[reader].unpadded_inputs
        for reader in get_consumers(var))
