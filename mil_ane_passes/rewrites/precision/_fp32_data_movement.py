"""Groups of ops that only move fp32, and their constants, converted to fp16."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.query import get_consumers, get_flat_inputs, is_const, is_opaque
from ...passes.contract import Hit, Miss
from ...utils.text_format import format_count

__all__ = ["convert_to_fp16", "is_cast_to_fp16", "is_fp32_data_movement", "match_region"]

_DATA_MOVEMENT_OPS = frozenset({
    "concat", "depth_to_space", "expand_dims", "gather", "identity", "pixel_shuffle", "pixel_unshuffle", "reshape",
    "reverse", "select", "slice_by_index", "slice_by_size", "space_to_depth", "split", "squeeze", "stack", "tile",
    "transpose",
})
"Ops that compute nothing: they only move their input."
_MAX_CONST_BYTES = 4096
"Largest size in bytes of an fp32 constant among the moved values that is stored in fp16 instead."


def is_fp32_data_movement(op: Operation) -> bool:
    if op.op_type not in _DATA_MOVEMENT_OPS or is_opaque(op) or any(var.dtype != types.fp32 for var in op.outputs):
        return False
    return op.op_type != "gather" or is_const(op.indices)


def is_cast_to_fp16(op: Operation) -> bool:
    return op.op_type == "cast" and bool(op.outputs[0].dtype == types.fp16)


def _is_cast_from_fp16(var: Var) -> bool:
    return var.op is not None and var.op.op_type == "cast" and bool(var.op.x.dtype == types.fp16)


def match_region(members: list[Operation]) -> Hit | Miss:
    made = {var for op in members for var in op.outputs}
    read = {var for op in members for var in get_flat_inputs(op) if var.dtype == types.fp32 and var not in made}
    heavy = next(
        (
            var
            for var in read
            if var.op is not None
            and var.op.op_type.startswith("const")
            and not (
                is_const(var)
                and var.val.nbytes <= _MAX_CONST_BYTES
                and np.array_equal(_round_to_fp16(var), var.val, equal_nan=True)
            )
        ),
        None,
    )
    if heavy is not None:
        return Miss(members[0], f"it moves the constant '{heavy.name}', which fp16 does not hold, or which is large")
    before = sum(_count_elements(var) for var in made if any(map(is_cast_to_fp16, get_consumers(var))))
    after = sum(_count_elements(var) for var in read if not _is_cast_from_fp16(var) and not is_const(var))
    if after > before:
        return Miss(members[0], f"{after} elements would be cast, {before} are now")
    return Hit(members[0], note=f"{format_count(len(members), 'op')} that move fp32", members=members,
               covers=members)


def _count_elements(var: Var) -> int:
    return math.prod(int(size) for size in var.shape if not is_symbolic(size))


def _round_to_fp16(var: Var) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        return np.asarray(var.val).astype(np.float16)


def convert_to_fp16(mb: RewriteBuilder, var: Var) -> Var:
    if _is_cast_from_fp16(var):
        return var.op.x
    if is_const(var):
        made: Var = mb.once(("half", var), lambda: mb.const(val=_round_to_fp16(var)[()], name=f"{var.name}_fp16"))
        return made
    with mb.at(mb.find_insertion_point(var), var.name):
        made = mb.once(("half", var), lambda: mb.cast(x=var, dtype="fp16"))
    return made
