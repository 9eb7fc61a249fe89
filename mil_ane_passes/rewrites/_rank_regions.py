"""Regions of values of high rank: whether they are whole."""

from __future__ import annotations

from collections.abc import Sequence

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ..core.query import consumers, flat_inputs, is_symbolic

__all__ = ["numbers", "outside"]


def numbers(var: Var) -> list[int]:
    """The shape, -1 for what is open."""
    return [-1 if is_symbolic(extent) else int(extent) for extent in var.shape]


def outside(block: Block, ops: Sequence[Operation], most: int) -> str:
    """Why values of the region are not its own affair, or ""."""
    entering = set(block.inputs.values() if isinstance(block, Function) else block.inputs)
    for op in ops:
        for var in op.outputs:
            if var.rank > most and var.consuming_blocks:
                return f"'{var.name}' of rank {var.rank} is an output"
            if var.rank > most and any(reader.enclosing_block is not block for reader in consumers(var)):
                return f"'{var.name}' of rank {var.rank} is read in a nested block"
            if var.rank <= most and numbers(var).count(-1) > 1:
                return f"more than one dimension of '{var.name}' is not known before the model runs"
        for var in flat_inputs(op):
            if var.rank > most and (var in entering or (var.op is not None and var.op.enclosing_block is not block)):
                return f"'{var.name}' of rank {var.rank} comes from outside"
    return ""
