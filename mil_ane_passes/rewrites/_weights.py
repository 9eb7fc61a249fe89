"""Reshaped and sliced weights: the same bytes where possible, and whether all readers of a weight change alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var

from ..ir.builder import RewriteBuilder
from ..ir.query import get_const_value, get_consumers, get_itemsize, is_compressed, is_const
from ..passes.layout import format_bytes

__all__ = [
    "cut_weight",
    "find_cut_unit",
    "find_reshape_obstacle",
    "find_sharing_obstacle",
    "find_slicing_obstacle",
    "has_uniform_readers",
    "reshape_weight",
    "slice_weight",
    "split_aligned",
    "split_evenly",
]


_PACKED_INPUTS = frozenset({"quantized_data", "indices", "data", "mask"})
"Inputs with the weight's own shape, in the forms without a `shape` parameter."
_TABLE_INPUTS = frozenset({"lut", "scale", "offset", "zero_point"})
"Inputs with one entry for each block of the weight."
_FLAT_INPUTS = frozenset({"nonzero_data"})
_RESHAPABLE_OPS = frozenset({"constexpr_affine_dequantize", "constexpr_lut_to_dense", "constexpr_sparse_to_dense",
                             "constexpr_blockwise_shift_scale"})
_CUT_OPS = {"constexpr_affine_dequantize": "quantized_data", "constexpr_lut_to_dense": "indices",
            "constexpr_blockwise_shift_scale": "data"}
"Forms that are cut without unpacking, and the input with one entry for each element."
_UNIFORM_READERS: WeakKeyDictionary[Operation, tuple[int, Any]] = WeakKeyDictionary()
"Weights with uniform readers: how many, and their settings. Every reader needs this, and it is computed once."


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

    made: Var = mb.once(("reshaped", var, shape), make)
    return made


def _reshape_input(mb: RewriteBuilder, var: Var, name: str, bound: Var, shape: tuple[int, ...]) -> Any:
    if name == "shape":
        return np.asarray(shape, dtype=bound.val.dtype)
    if "shape" in var.op.inputs or name in _FLAT_INPUTS:
        return bound
    if name in _PACKED_INPUTS:
        return mb.reshaped(bound, shape)
    if name in _TABLE_INPUTS and bound.rank > 1:
        table_axes = tuple(bound.shape[var.rank:])
        return mb.reshaped(bound, (int(bound.shape[0]), *[1] * (len(shape) - 1), *table_axes))
    return bound


def has_uniform_readers(op: Operation, block: Block, settings: Callable[[Operation], Any]) -> bool:
    """Return whether all readers of the weight of `op` are ops of its type in `block` with the same `settings`."""
    own = (op.op_type, block, settings(op))
    count, common = _UNIFORM_READERS.get(op.weight.op, (0, None))
    if common == own and len(op.weight.child_ops) <= count:  # some of the uniform readers were removed since
        return True
    is_uniform = all(each.op_type == op.op_type and each.enclosing_block is block and settings(each) == own[-1]
                     for each in get_consumers(op.weight))
    if is_uniform:
        _UNIFORM_READERS[op.weight.op] = len(op.weight.child_ops), own
    return is_uniform


def split_evenly(length: int, most: int) -> list[tuple[int, int]]:
    """Split `length` elements into the fewest ranges of at most `most`, as even as possible."""
    count = -(-length // most)
    ends = [length * number // count for number in range(count + 1)]
    return list(pairwise(ends))


def slice_weight(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Return elements `start` to `stop` of const `var` along `axis`: a view of its bytes, one const for all users."""
    at = axis % var.rank

    def make() -> np.ndarray[Any, Any]:
        part: np.ndarray[Any, Any] = np.asarray(var.val)[(slice(None),) * at + (slice(start, stop),)]
        return part

    return mb.weight(var, f"{at}_{start}_{stop}", make, view=True)


def find_cut_unit(var: Var, axis: int) -> int | str:
    """Return the number of elements of which cuts of `var` along `axis` have to be multiples, or why it is not cut.

    Const and compressed weights are cut exactly, without unpacking: `cut_weight` cuts the packed data and shares
    tables and scales that hold for the whole axis.
    """
    if is_const(var):
        return 1
    if not is_compressed(var) or var.op.op_type not in _CUT_OPS:
        maker = "nothing known" if var.op is None else var.op.op_type
        return f"the weight is made by {maker}, whose parts are not known"
    op, at, unit = var.op, axis % var.rank, 1
    packed = op.inputs[_CUT_OPS[op.op_type]]
    if op.op_type == "constexpr_lut_to_dense" and tuple(packed.shape) != tuple(var.shape) and "shape" not in op.inputs:
        return "the weight has a table of vectors"
    for name, bound in op.inputs.items():
        if name in _TABLE_INPUTS and bound is not None:
            if not is_const(bound):
                return f"{name} of the compressed weight is itself compressed"
            if "shape" not in op.inputs and bound.rank > at and op.op_type != "constexpr_affine_dequantize":
                unit = math.lcm(unit, int(var.shape[at]) // int(bound.shape[at]) if bound.shape[at] > 1 else 1)
    inner = find_cut_unit(packed, axis) if "shape" not in op.inputs else 1
    return inner if isinstance(inner, str) else math.lcm(unit, inner)


def cut_weight(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Return elements `start` to `stop` of const or compressed `var` along `axis`, stored the way `var` is.

    Both ends have to be multiples of `find_cut_unit`, or the end of the axis.
    """
    if is_const(var):
        return slice_weight(mb, var, axis, start, stop)

    def make() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            inputs = {name: _cut_input(mb, var, name, bound, axis % var.rank, start, stop)
                      for name, bound in var.op.inputs.items() if bound is not None}
            return getattr(mb, var.op.op_type)(**inputs)

    made: Var = mb.once(("cut", var, axis % var.rank, start, stop), make)
    return made


def _cut_input(mb: RewriteBuilder, var: Var, name: str, bound: Var, axis: int, start: int, stop: int) -> Any:
    op, extent = var.op, int(var.shape[axis])
    flat = "shape" in op.inputs
    if name == "shape":
        return np.asarray([*var.shape[:axis], stop - start, *var.shape[axis + 1:]], dtype=bound.val.dtype)
    if name == _CUT_OPS[op.op_type]:
        if not flat:
            return cut_weight(mb, bound, axis, start, stop)
        bits = max(1, int(op.lut.shape[0] - 1).bit_length())
        return mb.weight(bound, f"{axis}_{start}_{stop}", lambda: _cut_packed_bits(
            np.asarray(bound.val), bits, tuple(var.shape), axis, start, stop))
    if name not in _TABLE_INPUTS or flat:
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
    """Cut numbers of `bits` bits each that are packed without gaps, least significant bit first."""
    row = math.prod(shape[1:]) * bits
    if axis == 0 and row % 8 == 0:
        return packed[start * row // 8:stop * row // 8]
    stream = np.unpackbits(packed.reshape(-1).view(np.uint8), bitorder="little")[:math.prod(shape) * bits]
    part = stream.reshape(*shape, bits)[(slice(None),) * axis + (slice(start, stop),)]
    return np.packbits(part.reshape(-1), bitorder="little")


def find_sharing_obstacle(
    var: Var, op: Operation, is_cut_alike: Callable[[Operation, Var], bool], most: int,
) -> str:
    """Return why const or compressed `var` is not cut for `op`, or "": something else reads it whole.

    `is_cut_alike` returns whether an op cuts a weight that it reads in the same way.
    """
    if is_const(var):
        return find_slicing_obstacle(var, op, lambda other: is_cut_alike(other, var), most)
    readers = _collect_readers_of_data(var)
    if readers is None:
        return "the data of the compressed weight is read otherwise as well: its parts would be stored beside it"
    if not all(other.enclosing_block is op.enclosing_block and is_cut_alike(other, weight)
               for other, weight in readers):
        return "the compressed weight is read whole as well: its parts would be stored beside it"
    return ""


def _collect_readers_of_data(var: Var) -> list[tuple[Operation, Var]] | None:
    """Collect the ops that read the data of compressed `var`, unpacked, each with the unpacked weight that it reads.

    Returns None if something reads the data itself.
    """
    data = var
    while not is_const(data):
        data = data.op.inputs[_CUT_OPS[data.op.op_type]]
    readers: list[tuple[Operation, Var]] = []
    pending = [data]
    while pending:
        current = pending.pop()
        if current.consuming_blocks:
            return None
        for other in get_consumers(current):
            name = _CUT_OPS.get(other.op_type, "")
            if name and other.inputs[name] is current:
                pending.append(other.outputs[0])
            elif current is data:
                return None
            else:
                readers.append((other, current))
    return readers


def split_aligned(length: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Split `length` elements into `count` ranges, as even as multiples of `unit` allow, or fewer if one is empty."""
    ends = dict.fromkeys(min(length, round(length * number / count / unit) * unit) for number in range(count))
    return list(pairwise([*ends, length])) if length not in ends else list(pairwise(ends))


def _count_duplicated_bytes(var: Var, op: Operation, alike: Callable[[Operation], bool]) -> int:
    """Count the bytes by which the weights grow when `op` reads slices of const `var`: 0 where all its readers will."""
    readers = get_consumers(var)
    if not var.consuming_blocks and all(other.enclosing_block is op.enclosing_block and other.op_type == op.op_type
                                        and alike(other) for other in readers):
        return 0
    return int(np.prod(var.shape)) * get_itemsize(var)


def find_slicing_obstacle(var: Var, op: Operation, alike: Callable[[Operation], bool], most: int) -> str:
    """Return why const `var` is not sliced for `op`, or ""."""
    size = _count_duplicated_bytes(var, op, alike)
    if size <= most:
        return ""
    return (f"the weight '{var.name}' is read whole as well: its pieces would add {format_bytes(size)}, "
            f"above max_bytes={most}")
