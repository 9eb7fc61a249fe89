"""Slices of weights along an axis, stored as the weights are: views of their bytes, or packed data with its tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var

from .builder import RewriteBuilder
from .query import get_const_value, is_compressed, is_const

__all__ = ["CUT_OPS", "TABLE_INPUTS", "cut_weight", "find_cut_unit", "slice_weight"]

TABLE_INPUTS = frozenset({"lut", "scale", "offset", "zero_point"})
"Inputs with one entry for each block (group of elements) of the weight."
CUT_OPS = {"constexpr_affine_dequantize": "quantized_data", "constexpr_lut_to_dense": "indices",
           "constexpr_blockwise_shift_scale": "data"}
"Ops whose weight is sliced without unpacking it, and the op's input that has one entry for each element."


def slice_weight(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Return elements `start` to `stop` of const `var` along `axis` as a const that is a view of its bytes.

    Equal calls return the same const.
    """
    at = axis % var.rank

    def slice_array() -> np.ndarray[Any, Any]:
        part: np.ndarray[Any, Any] = np.asarray(var.val)[(slice(None),) * at + (slice(start, stop),)]
        return part

    return mb.weight(var, f"{at}_{start}_{stop}", slice_array, view=True)


def find_cut_unit(var: Var, axis: int) -> int | str:
    """Return the number n such that `var` can be cut along `axis` at multiples of n; a str is the reason why it cannot.

    Const and compressed weights are cut exactly, without unpacking: `cut_weight` cuts the packed data, and the parts
    share tables and scales that apply to the whole axis.
    """
    if is_const(var):
        return 1
    if not is_compressed(var) or var.op.op_type not in CUT_OPS:
        maker = "an unknown op" if var.op is None else var.op.op_type
        return f"the weight is made by {maker}, which cannot be split"
    op, at, unit = var.op, axis % var.rank, 1
    packed = op.inputs[CUT_OPS[op.op_type]]
    if op.op_type == "constexpr_lut_to_dense" and tuple(packed.shape) != tuple(var.shape) and "shape" not in op.inputs:
        return "the weight has a table of vectors"
    for name, bound in op.inputs.items():
        if name in TABLE_INPUTS and bound is not None:
            if not is_const(bound):
                return f"{name} of the compressed weight is itself compressed"
            if "shape" not in op.inputs and bound.rank > at and op.op_type != "constexpr_affine_dequantize":
                unit = math.lcm(unit, int(var.shape[at]) // int(bound.shape[at]) if bound.shape[at] > 1 else 1)
    inner = find_cut_unit(packed, axis) if "shape" not in op.inputs else 1
    return inner if isinstance(inner, str) else math.lcm(unit, inner)


def cut_weight(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Return elements `start` to `stop` of const or compressed `var` along `axis`, stored as `var` is.

    `start` and `stop` must be multiples of `find_cut_unit`, or the end of the axis.
    """
    if is_const(var):
        return slice_weight(mb, var, axis, start, stop)

    def build_cut() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            inputs = {name: _cut_input(mb, var, name, bound, axis % var.rank, start, stop)
                      for name, bound in var.op.inputs.items() if bound is not None}
            return getattr(mb, var.op.op_type)(**inputs)

    made: Var = mb.once(("cut", var, axis % var.rank, start, stop), build_cut)
    return made


def _cut_input(mb: RewriteBuilder, var: Var, name: str, bound: Var, axis: int, start: int, stop: int) -> Any:
    op, extent = var.op, int(var.shape[axis])
    flat = "shape" in op.inputs
    if name == "shape":
        return np.asarray([*var.shape[:axis], stop - start, *var.shape[axis + 1:]], dtype=bound.val.dtype)
    if name == CUT_OPS[op.op_type]:
        if not flat:
            return cut_weight(mb, bound, axis, start, stop)
        bits = max(1, int(op.lut.shape[0] - 1).bit_length())
        return mb.weight(bound, f"{axis}_{start}_{stop}", lambda: _cut_packed_bits(
            np.asarray(bound.val), bits, tuple(var.shape), axis, start, stop))
    if name not in TABLE_INPUTS or flat:
        return bound
    if op.op_type == "constexpr_affine_dequantize":  # vectors along `axis` of the op
        along = bound.rank and int(get_const_value(op.inputs["axis"])) % var.rank == axis
        return slice_weight(mb, bound, 0, start, stop) if along and bound.shape[0] > 1 else bound
    blocks = int(bound.shape[axis])
    if blocks == 1:
        return bound
    return slice_weight(mb, bound, axis, start * blocks // extent, stop * blocks // extent)


def _cut_packed_bits(
    packed: np.ndarray[Any, Any], bits: int, shape: tuple[int, ...], axis: int, start: int, stop: int,
) -> np.ndarray[Any, Any]:
    """Cut a range from numbers of `bits` bits each that are packed without gaps, least significant bit first."""
    row = math.prod(shape[1:]) * bits
    if axis == 0 and row % 8 == 0:
        return packed[start * row // 8:stop * row // 8]
    stream = np.unpackbits(packed.reshape(-1).view(np.uint8), bitorder="little")[:math.prod(shape) * bits]
    part = stream.reshape(*shape, bits)[(slice(None),) * axis + (slice(start, stop),)]
    return np.packbits(part.reshape(-1), bitorder="little")
