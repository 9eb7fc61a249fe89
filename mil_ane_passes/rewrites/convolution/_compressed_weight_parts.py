"""Equal parts of a compressed weight along one axis, still compressed."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var

from ...ir.builder import RewriteBuilder
from ...ir.query import is_compressed, is_const

__all__ = ["count_table_blocks", "find_split_obstacle", "slice_weight_part"]

_PACKED_INPUTS = {"constexpr_lut_to_dense": "indices", "constexpr_blockwise_shift_scale": "data"}
"The iOS18 forms that can be split, and the input with the weight's own shape; other inputs have one entry a block."


def count_table_blocks(var: Var, axis: int) -> int:
    """Count the blocks along `axis` with a table or scale of their own."""
    blocks = 1
    while is_compressed(var):
        blocks = max(blocks, *(bound.shape[axis] for name, bound in _collect_tables(var).items()))
        var = var.op.inputs[_PACKED_INPUTS[var.op.op_type]]
    return blocks


def _collect_tables(var: Var) -> dict[str, Var]:
    return {name: bound for name, bound in var.op.inputs.items() if name in ("lut", "scale", "offset")}


def find_split_obstacle(var: Var, axis: int, count: int) -> str | None:
    """Return why `var` cannot be cut into `count` equal parts along `axis`, or None when it can."""
    if is_const(var):
        return None if var.shape[axis] % count == 0 else f"{var.shape[axis]} channels make no {count} equal parts"
    if not is_compressed(var) or var.op.op_type not in _PACKED_INPUTS:
        return f"weight is made by {'nothing known' if var.op is None else var.op.op_type}, whose parts are not known"
    for bound in _collect_tables(var).values():
        if not is_const(bound):
            return "a lookup table or scale is itself compressed"
        if bound.shape[axis] % count and count % bound.shape[axis]:
            return f"{bound.shape[axis]} tables and {count} parts do not fall together"
    return find_split_obstacle(var.op.inputs[_PACKED_INPUTS[var.op.op_type]], axis, count)


def slice_weight_part(mb: RewriteBuilder, var: Var, axis: int, number: int, count: int) -> Var:
    """Return part `number` of `count`: its packed data and its tables; a single table is shared by all parts."""
    if is_const(var):
        extent = int(var.shape[axis]) // count
        return _slice_const(mb, var, axis, number * extent, (number + 1) * extent)

    def make() -> Any:
        inputs = dict(var.op.inputs)
        packed = _PACKED_INPUTS[var.op.op_type]
        inputs[packed] = slice_weight_part(mb, inputs[packed], axis, number, count)
        for name, bound in _collect_tables(var).items():
            first = number * bound.shape[axis] // count
            inputs[name] = _slice_const(mb, bound, axis, first, first + max(bound.shape[axis] // count, 1))
        return getattr(mb, var.op.op_type)(**inputs)

    def placed() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            return make()

    made: Var = mb.once(("part", var, axis, number, count), placed)
    return made


def _slice_const(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Return elements `start` to `stop` of a const along `axis`, as one const for all users."""
    if (start, stop) == (0, var.shape[axis]):
        return var
    return mb.weight(var, f"{axis}_{start}_{stop}", lambda: np.take(np.asarray(var.val), range(start, stop), axis))
