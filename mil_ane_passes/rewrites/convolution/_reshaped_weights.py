"""Reshaped weights: the same bytes, compressed or not, as long as the first axis stays."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var

from ...ir.builder import RewriteBuilder
from ...ir.query import is_compressed, is_const

__all__ = ["find_reshape_obstacle", "reshape_weight"]

_PACKED_INPUTS = frozenset({"quantized_data", "indices", "data", "mask"})
"Inputs with the weight's own shape, in the forms without a `shape` parameter."
_TABLE_INPUTS = frozenset({"lut", "scale", "offset", "zero_point"})
_FLAT_INPUTS = frozenset({"nonzero_data"})
_RESHAPABLE_OPS = frozenset({"constexpr_affine_dequantize", "constexpr_lut_to_dense", "constexpr_sparse_to_dense",
                             "constexpr_blockwise_shift_scale"})


def find_reshape_obstacle(var: Var) -> str | None:
    """Return why `reshape_weight` cannot reshape `var`, or None when it can."""
    if is_const(var):
        return None
    if not is_compressed(var):
        return "weight is computed, not a const"
    op = var.op
    if op.op_type not in _RESHAPABLE_OPS:
        return f"weight is made by {op.op_type}, which is not known in another shape"
    for name, bound in op.inputs.items():
        if bound is None:
            continue
        if not is_const(bound):
            return f"{name} of the compressed weight is no constant"
        if name in ("axis", "vector_axis") and (name == "vector_axis" or int(bound.val) % var.rank):
            return "weight is compressed along another axis than the first"
        if name in _TABLE_INPUTS and bound.rank > 1 and any(extent > 1 for extent in bound.shape[1:var.rank]):
            return "weight is compressed in blocks along another axis than the first"
    return None


def reshape_weight(mb: RewriteBuilder, var: Var, shape: tuple[int, ...]) -> Var:
    """Reshape `var` to `shape`: a view of a const's bytes, or the same packed data again under another shape."""
    if is_const(var):
        return mb.reshaped(var, shape)

    def make() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            inputs = {name: _reshape_input(mb, var, name, bound, shape) for name, bound in var.op.inputs.items()
                      if bound is not None}
            return getattr(mb, var.op.op_type)(**inputs)

    made: Var = mb.once(("shown", var, shape), make)
    return made


def _reshape_input(mb: RewriteBuilder, var: Var, name: str, bound: Var, shape: tuple[int, ...]) -> Any:
    if name == "shape":
        return np.asarray(shape, dtype=bound.val.dtype)
    if "shape" in var.op.inputs or name in _FLAT_INPUTS:
        return bound
    if name in _PACKED_INPUTS:
        return mb.reshaped(bound, shape)
    if name in _TABLE_INPUTS and bound.rank > 1:
        beyond = tuple(bound.shape[var.rank:])
        return mb.reshaped(bound, (int(bound.shape[0]), *[1] * (len(shape) - 1), *beyond))
    return bound
