"""Regions of values of high rank: whether they are self-contained, and how they are built with few axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_consumers, get_flat_inputs, is_const, is_symbolic, is_used
from ._rank_lowering import BuildFunction, RankBounds, plan_op

__all__ = ["build_region", "plan_region"]


def plan_region(
    block: Block, ops: Sequence[Operation], bounds: RankBounds
) -> list[tuple[Operation, BuildFunction]] | str:
    """Plan how to build each op of a region with few axes, or return why the region is not rewritten."""
    reason = find_region_obstacle(block, ops, bounds.rank)
    if reason:
        return reason
    plans: list[tuple[Operation, BuildFunction]] = []
    for op in ops:
        plan = plan_op(op, bounds)
        if isinstance(plan, str):
            return f"{op.op_type} '{op.outputs[0].name if op.outputs else op.name}': {plan}"
        plans.append((op, plan))
    return plans


def build_region(mb: RewriteBuilder, plans: Sequence[tuple[Operation, BuildFunction]], most: int) -> dict[Var, Var]:
    """Build the region with `most` axes at most; return the replacement of each value that leaves it."""
    shown: dict[Var, Var] = {}
    seen: dict[tuple[Var, tuple[int, ...]], Var] = {}

    def view(var: Var, shape: Sequence[int] | None) -> Var:
        held = shown.get(var, var)
        if shape is None or list(shape) == make_reshape_shape(held):
            return held
        if is_const(held):
            return mb.reshaped(held, tuple(shape))
        key = (held, tuple(shape))
        if key not in seen:
            seen[key] = mb.reshape(x=held, shape=np.array(shape, dtype=np.int32))
        return seen[key]

    replaced: dict[Var, Var] = {}
    for op, build in plans:
        with mb.at(op):
            for old, new in zip(op.outputs, build(mb, view)):
                shown[old] = new
                if old.rank <= most:
                    shown[old] = replaced[old] = view(new, make_reshape_shape(old))
    return replaced


def make_reshape_shape(var: Var) -> list[int]:
    """Return the shape with -1 for a symbolic extent."""
    return [-1 if is_symbolic(extent) else int(extent) for extent in var.shape]


def find_region_obstacle(block: Block, ops: Sequence[Operation], most: int) -> str:
    """Return why the region cannot be rewritten, such as a high-rank value that is visible outside of it; else ""."""
    entering = set(block.inputs.values() if isinstance(block, Function) else block.inputs)
    for op in ops:
        if not any(var.rank <= most or is_used(var) for var in op.outputs):
            return f"nothing reads '{op.outputs[0].name}'"
        for var in op.outputs:
            if var.rank > most and var.consuming_blocks:
                return f"'{var.name}' of rank {var.rank} is an output"
            if var.rank > most and any(reader.enclosing_block is not block for reader in get_consumers(var)):
                return f"'{var.name}' of rank {var.rank} is read in a nested block"
            if var.rank <= most and make_reshape_shape(var).count(-1) > 1:
                return f"more than one dimension of '{var.name}' is not known before the model runs"
        for var in get_flat_inputs(op):
            if var.rank > most and (var in entering or (var.op is not None and var.op.enclosing_block is not block)):
                return f"'{var.name}' of rank {var.rank} comes from outside"
    return ""
