"""Bytes that values take on the ANE, by the layout that Apple and a driver's author describe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Program, Var, types

from ..core.query import all_ops, itemsize, static_shape

__all__ = ["Buffer", "buffers"]


@dataclass(frozen=True)
class Buffer:
    """The bytes of one value: `dense` without padding, `padded` as laid out."""

    function: str
    value: str
    shape: tuple[int, ...]
    dense: int
    padded: int

    def to_dict(self) -> dict[str, Any]:
        return {"function": self.function, "value": self.value, "shape": list(self.shape), "dense_bytes": self.dense,
                "padded_bytes": self.padded}


def buffers(program: Program) -> list[Buffer]:
    """One for each input and each value that an op makes, where the shape is static; weights are none."""
    found = []
    for name, function in program.functions.items():
        values = [*function.inputs.values()]
        values += [var for owner, op in all_ops(program) if owner == name and op.op_type != "const"
                   and not op.op_type.startswith("constexpr_") for var in op.outputs]
        found += [made for var in values if (made := _buffer(name, var)) is not None]
    return found


def _buffer(function: str, var: Var) -> Buffer | None:
    if types.is_list(var.sym_type) or types.is_str(var.dtype):
        return None
    shape = static_shape(var)
    if shape is None:
        return None
    size = itemsize(var)
    *outer, width = (1, *shape)
    row = -(-width * size // 64) * 64
    padded = -(-math.prod(outer) * row // 16384) * 16384
    return Buffer(function, var.name, shape, math.prod(shape) * size, padded)
