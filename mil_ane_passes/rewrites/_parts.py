"""Equal parts of a compressed weight along one axis, still compressed."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var

from ..core.build import RewriteBuilder
from ..core.query import is_compressed, is_const

__all__ = ["cannot_part", "part", "table_blocks"]

_PACKED = {"constexpr_lut_to_dense": "indices", "constexpr_blockwise_shift_scale": "data"}
"The iOS18 forms that can be parted, and which input has the weight's own shape; the others hold one entry a block."


def table_blocks(var: Var, axis: int) -> int:
    """The number of blocks with a table or scale of their own along `axis`."""
    blocks = 1
    while is_compressed(var):
        blocks = max(blocks, *(bound.shape[axis] for name, bound in _tables(var).items()))
        var = var.op.inputs[_PACKED[var.op.op_type]]
    return blocks


def _tables(var: Var) -> dict[str, Var]:
    return {name: bound for name, bound in var.op.inputs.items() if name in ("lut", "scale", "offset")}


def cannot_part(var: Var, axis: int, count: int) -> str | None:
    """Why `var` cannot be cut into `count` equal parts along `axis`, or None when it can."""
    if is_const(var):
        return None if var.shape[axis] % count == 0 else f"{var.shape[axis]} channels make no {count} equal parts"
    if not is_compressed(var) or var.op.op_type not in _PACKED:
        return f"weight is made by {'nothing known' if var.op is None else var.op.op_type}, whose parts are not known"
    for bound in _tables(var).values():
        if not is_const(bound):
            return "a lookup table or scale is itself compressed"
        if bound.shape[axis] % count and count % bound.shape[axis]:
            return f"{bound.shape[axis]} tables and {count} parts do not fall together"
    return cannot_part(var.op.inputs[_PACKED[var.op.op_type]], axis, count)


def part(mb: RewriteBuilder, var: Var, axis: int, number: int, count: int) -> Var:
    """Part `number` of `count`: the packed data and the tables of that part, or the very table where it has but one."""
    if is_const(var):
        extent = int(var.shape[axis]) // count
        return _piece(mb, var, axis, number * extent, (number + 1) * extent)

    def make() -> Any:
        inputs = dict(var.op.inputs)
        packed = _PACKED[var.op.op_type]
        inputs[packed] = part(mb, inputs[packed], axis, number, count)
        for name, bound in _tables(var).items():
            first = number * bound.shape[axis] // count
            inputs[name] = _piece(mb, bound, axis, first, first + max(bound.shape[axis] // count, 1))
        return getattr(mb, var.op.op_type)(**inputs)

    def placed() -> Any:
        with mb.at(mb.early(var), var.name):
            return make()

    made: Var = mb.once(("part", var, axis, number, count), placed)
    return made


def _piece(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Elements `start` to `stop` of a const along `axis`, one const for all who ask."""
    if (start, stop) == (0, var.shape[axis]):
        return var
    return mb.weight(var, f"{axis}_{start}_{stop}", lambda: np.take(np.asarray(var.val), range(start, stop), axis))
