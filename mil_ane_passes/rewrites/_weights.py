"""Reshaped and sliced weights that share bytes where possible, and checks that all users of a weight change alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var

from ..ir.builder import RewriteBuilder
from ..ir.query import get_consumers, get_itemsize, is_compressed, is_const
from ..ir.weight_cuts import CUT_OPS, TABLE_INPUTS
from ..passes.layout import format_bytes

__all__ = [
    "find_reshape_obstacle",
    "find_sharing_obstacle",
    "find_slicing_obstacle",
    "has_uniform_readers",
    "reshape_weight",
    "split_aligned",
    "split_evenly",
]


_PACKED_INPUTS = frozenset({"quantized_data", "indices", "data", "mask"})
"Inputs with the weight's own shape, in the forms without a `shape` parameter."
_FLAT_INPUTS = frozenset({"nonzero_data"})
_RESHAPABLE_OPS = frozenset({"constexpr_affine_dequantize", "constexpr_lut_to_dense", "constexpr_sparse_to_dense",
                             "constexpr_blockwise_shift_scale"})
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
        return f"weight is computed by {op.op_type}, which cannot be reshaped"
    for name, bound in op.inputs.items():
        if bound is None:
            continue
        if not is_const(bound):
            return f"{name} of the compressed weight is not constant"
        if name in ("axis", "vector_axis") and (name == "vector_axis" or int(bound.val) % var.rank):
            return "weight is compressed along another axis than the first"
        if name in TABLE_INPUTS and bound.rank > 1 and any(extent > 1 for extent in bound.shape[1:var.rank]):
            return "weight is compressed in blocks along another axis than the first"
    return None


def reshape_weight(mb: RewriteBuilder, var: Var, shape: tuple[int, ...]) -> Var:
    """Reshape `var` to `shape`: a view of a const's bytes, or the same packed data again under another shape."""
    if is_const(var):
        return mb.reshaped(var, shape)

    def build_reshape() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            inputs = {name: _reshape_input(mb, var, name, bound, shape) for name, bound in var.op.inputs.items()
                      if bound is not None}
            return getattr(mb, var.op.op_type)(**inputs)

    made: Var = mb.once(("reshaped", var, shape), build_reshape)
    return made


def _reshape_input(mb: RewriteBuilder, var: Var, name: str, bound: Var, shape: tuple[int, ...]) -> Any:
    if name == "shape":
        return np.asarray(shape, dtype=bound.val.dtype)
    if "shape" in var.op.inputs or name in _FLAT_INPUTS:
        return bound
    if name in _PACKED_INPUTS:
        return mb.reshaped(bound, shape)
    if name in TABLE_INPUTS and bound.rank > 1:
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


def find_sharing_obstacle(
    var: Var, op: Operation, is_cut_alike: Callable[[Operation, Var], bool], most: int,
) -> str:
    """Return why const or compressed `var` is not cut for `op`, or "": it has another use as a whole.

    `is_cut_alike` returns whether an op cuts a weight that it reads in the same way.
    """
    if is_const(var):
        return find_slicing_obstacle(var, op, lambda other: is_cut_alike(other, var), most)
    readers = _collect_readers_of_data(var)
    if readers is None:
        return "the data of the compressed weight has other users: its parts would be stored in addition"
    if not all(other.enclosing_block is op.enclosing_block and is_cut_alike(other, weight)
               for other, weight in readers):
        return "the compressed weight is also used as a whole: its parts would be stored in addition"
    return ""


def _collect_readers_of_data(var: Var) -> list[tuple[Operation, Var]] | None:
    """Collect the ops that read the data of compressed `var`, unpacked, each with the unpacked weight that it reads.

    Returns None if something reads the data itself.
    """
    data = var
    while not is_const(data):
        data = data.op.inputs[CUT_OPS[data.op.op_type]]
    readers: list[tuple[Operation, Var]] = []
    pending = [data]
    while pending:
        current = pending.pop()
        if current.consuming_blocks:
            return None
        for other in get_consumers(current):
            name = CUT_OPS.get(other.op_type, "")
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
    return (f"the weight '{var.name}' is also used as a whole: its pieces would add {format_bytes(size)}, "
            f"above max_bytes={most}")
