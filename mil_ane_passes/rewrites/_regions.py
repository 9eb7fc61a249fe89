"""Finds the regions of a block that need fewer layout ops when they keep the dummy axis of the lifts around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from coremltools.converters.mil.mil import Block, Operation, Var

from ..core.groups import sharing
from ..core.query import consumers
from ._carry import cannot_carry, main_inputs
from ._lift import axis_of

__all__ = ["Region", "expands", "needed_narrow", "regions"]


@dataclass
class Region:
    """Ops that hang together by values that have, or could have, the dummy axis at position `at`.

    `ops` in block order; `values` all rank-3 values they read (consts aside) or make; `before` and `after` the number
    of squeeze and expand_dims ops on those values, as they are and with `ops` carried.
    """

    at: int
    ops: list[Operation] = field(default_factory=list)
    values: dict[Var, None] = field(default_factory=dict)
    before: int = 0
    after: int = 0


def regions(block: Block, at: int) -> Iterator[Region]:
    """The regions of one block for one position of the dummy axis; linear in the block's ops and their operands."""
    kept = _between_lifts(block, at)
    for region in _connected(kept, at):
        for var in region.values:
            squeezed = _is_squeezed(var, at)
            region.before += squeezed + sum(expands(reader, block, at) for reader in consumers(var))
            if squeezed or var.op in kept:
                region.after += needed_narrow(var, kept, block, at)
            else:
                region.after += 1  # a value from outside: one expand_dims serves all
        yield region


def _between_lifts(block: Block, at: int) -> dict[Operation, None]:
    """Ops whose operands have the dummy axis at hand, all but one at most, and whose result leads to an op that wants
    it. The one operand (a mask, a scale that is computed) gets an expand_dims of its own, which costs no more than to
    end the region there."""
    able: dict[Operation, list[Var]] = {}
    wide: set[Var] = set()
    for op in block.operations:
        operands = main_inputs(op)
        if operands and cannot_carry(op, at) is None:
            able[op] = operands
        elif axis_of(op) == at:
            wide.add(op.outputs[0] if op.op_type == "squeeze" else op.x)
    wide.update(_worth_expanding(able, block, at))
    candidates = []
    for op, operands in able.items():
        bare = {var for var in operands if var not in wide}
        if not bare or (len(bare) == 1 and len(set(operands)) > 1):
            candidates.append(op)
            wide.update(op.outputs)
    kept: dict[Operation, None] = {}
    for op in reversed(candidates):
        readers = [reader for var in op.outputs for reader in consumers(var)]
        if any(reader in kept or expands(reader, block, at) for reader in readers):
            kept[op] = None
    return dict.fromkeys(reversed(kept))


def _worth_expanding(able: dict[Operation, list[Var]], block: Block, at: int) -> Iterator[Var]:
    """Values that several ops in a row lead from to expand_dims only: one before them all serves as well."""
    leading: set[Operation] = set()
    for op in reversed(able):
        readers = [reader for var in op.outputs for reader in consumers(var)]
        narrow = any(var.consuming_blocks for var in op.outputs)
        if readers and not narrow and all(reader in leading or expands(reader, block, at) for reader in readers):
            leading.add(op)
    entries = Counter(operands[0] for op, operands in able.items() if op in leading and len(set(operands)) == 1)
    return (var for var, count in entries.items() if count > 1)


def _connected(kept: dict[Operation, None], at: int) -> list[Region]:
    """`kept` by the values they share."""
    values = {op: [*main_inputs(op), *op.outputs] for op in kept}
    return [Region(at, ops, dict.fromkeys(var for op in ops for var in values[op])) for ops in sharing(values)]


def _is_squeezed(var: Var, at: int) -> bool:
    return var.op is not None and var.op.op_type == "squeeze" and axis_of(var.op) == at


def expands(op: Operation, block: Block, at: int) -> bool:
    """Whether `op` is an expand_dims that adds the dummy axis, in `block` or in one nested in it."""
    if op.op_type != "expand_dims" or axis_of(op) != at:
        return False
    inner = op.enclosing_block
    while inner is not block and inner is not None and inner.outer_op is not None:
        inner = inner.outer_op.enclosing_block
    return inner is block


def needed_narrow(var: Var, members: Container[Operation], block: Block, at: int) -> bool:
    """Whether anything but `members` and the region's own expand_dims reads `var`, and so needs it without the axis."""
    return bool(var.consuming_blocks) or any(
        reader not in members and not expands(reader, block, at) for reader in consumers(var))
