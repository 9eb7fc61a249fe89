"""Regions of a block that need fewer layout ops when they keep the dummy axis of the lifts around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from coremltools.converters.mil.mil import Block, Operation, Var

from ...ir.op_groups import group_by_shared_values
from ...ir.query import get_consumers
from ._conv_1d_lifting import find_dummy_axis
from ._dummy_axis_ops import collect_main_inputs, find_carry_obstacle

__all__ = ["LiftRegion", "is_dummy_axis_expansion", "is_needed_without_axis", "iterate_lift_regions"]


@dataclass
class LiftRegion:
    """Ops connected by values that have, or could have, the dummy axis at position `at`.

    `ops` is in block order; `values` are all rank-3 values they read (except consts) or compute. `before` and `after`
    count the squeeze and expand_dims ops on those values, as they are and with `ops` carried.
    """

    at: int
    ops: list[Operation] = field(default_factory=list)
    values: dict[Var, None] = field(default_factory=dict)
    before: int = 0
    after: int = 0


def iterate_lift_regions(block: Block, at: int) -> Iterator[LiftRegion]:
    """Yield the regions of one block for one position of the dummy axis.

    The time is linear in the block's ops and their operands.
    """
    kept = _find_ops_between_lifts(block, at)
    for region in _group_connected_ops(kept, at):
        for var in region.values:
            squeezed = _is_squeezed(var, at)
            region.before += squeezed + sum(is_dummy_axis_expansion(reader, block, at) for reader in get_consumers(var))
            if squeezed or var.op in kept:
                region.after += is_needed_without_axis(var, kept, block, at)
            else:
                region.after += 1  # a value from outside: one expand_dims for all its readers
        yield region


def _find_ops_between_lifts(block: Block, at: int) -> dict[Operation, None]:
    """Find ops that have the dummy axis on all operands but one at most, and whose result leads to an op that needs it.

    The one operand (a mask, a scale that is computed) gets an expand_dims of its own, which costs no more than to end
    the region there.
    """
    able: dict[Operation, list[Var]] = {}
    wide: set[Var] = set()
    for op in block.operations:
        operands = collect_main_inputs(op)
        if operands and find_carry_obstacle(op, at) is None:
            able[op] = operands
        elif find_dummy_axis(op) == at:
            wide.add(op.outputs[0] if op.op_type == "squeeze" else op.x)
    wide.update(_find_values_worth_expanding(able, block, at))
    candidates = []
    for op, operands in able.items():
        bare = {var for var in operands if var not in wide}
        if not bare or (len(bare) == 1 and len(set(operands)) > 1):
            candidates.append(op)
            wide.update(op.outputs)
    kept: dict[Operation, None] = {}
    for op in reversed(candidates):
        readers = [reader for var in op.outputs for reader in get_consumers(var)]
        if any(reader in kept or is_dummy_axis_expansion(reader, block, at) for reader in readers):
            kept[op] = None
    return dict.fromkeys(reversed(kept))


def _find_values_worth_expanding(able: dict[Operation, list[Var]], block: Block, at: int) -> Iterator[Var]:
    """Find values that several chains of ops lead from to expand_dims only.

    One expand_dims before the chains replaces those after them.
    """
    leading: set[Operation] = set()
    for op in reversed(able):
        readers = [reader for var in op.outputs for reader in get_consumers(var)]
        narrow = any(var.consuming_blocks for var in op.outputs)
        if (
            readers
            and not narrow
            and all(reader in leading or is_dummy_axis_expansion(reader, block, at) for reader in readers)
        ):
            leading.add(op)
    entries = Counter(operands[0] for op, operands in able.items() if op in leading and len(set(operands)) == 1)
    return (var for var, count in entries.items() if count > 1)


def _group_connected_ops(kept: dict[Operation, None], at: int) -> list[LiftRegion]:
    """Group the ops `kept` by the values they share."""
    values = {op: [*collect_main_inputs(op), *op.outputs] for op in kept}
    return [
        LiftRegion(at, ops, dict.fromkeys(var for op in ops for var in values[op]))
        for ops in group_by_shared_values(values)
    ]


def _is_squeezed(var: Var, at: int) -> bool:
    return var.op is not None and var.op.op_type == "squeeze" and find_dummy_axis(var.op) == at


def is_dummy_axis_expansion(op: Operation, block: Block, at: int) -> bool:
    """Return whether `op` is an expand_dims that adds the dummy axis, in `block` or in one nested in it."""
    if op.op_type != "expand_dims" or find_dummy_axis(op) != at:
        return False
    inner = op.enclosing_block
    while inner is not block and inner is not None and inner.outer_op is not None:
        inner = inner.outer_op.enclosing_block
    return inner is block


def is_needed_without_axis(var: Var, members: Container[Operation], block: Block, at: int) -> bool:
    """Return whether an op besides `members` and the region's expand_dims uses `var`, which it needs without the
    axis."""
    return bool(var.consuming_blocks) or any(
        reader not in members and not is_dummy_axis_expansion(reader, block, at) for reader in get_consumers(var))
