"""Domains of inputs: indices (rows of a table, positions in a cache) must exist, flags are 0 or 1.

One backward sweep over a function's ops propagates requirements on an op's result to requirements on its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import is_opaque
from .interval_propagation import (
    ANY_VALUE,
    INVERSE_RULES,
    Interval,
    OperandRequirements,
    RequiredIntervals,
    get_constant_value,
    intersect_intervals,
)

__all__ = ["choose_integer_range", "infer_input_domains", "limit_input_domains"]

_MIN_NEGATIVE_MASK, _MIN_POSITIVE_MASK = 5000.0, 65504.0
"""Constant factors that identify a mask: at most -5000, or at least 65504.

Additive masks of models are products with -10000 or less. A factor of 65504 overflows fp16 unless the other factor is a
flag of 0 or 1; ordinary positive factors are smaller.
"""


def infer_input_domains(function: Function, sizes: Mapping[Any, int], negative: bool = False) -> dict[str, Interval]:
    """Infer the interval of valid values for each input of `function`.

    `sizes` are the extents of its symbols. With `negative`, the interval includes indices that count from the end of an
    axis. Requirements are propagated through casts, changes of shape, selections, nested blocks and arithmetic with
    constants; other ops do not restrict an input.
    """
    sweep = _BackwardSweep(sizes, negative)
    sweep.visit_block(function)
    return {name: sweep.get_interval(var) for name, var in function.inputs.items()}


def limit_input_domains(
    function: Function, sizes: Mapping[Any, int], ranges: Mapping[str, Interval] | None
) -> dict[str, Interval]:
    """Infer the domains of the inputs, within the user's intervals."""
    domains = infer_input_domains(function, sizes)
    return {name: intersect_intervals([domain, (ranges or {}).get(name, ANY_VALUE)])
            for name, domain in domains.items()}


def choose_integer_range(required: Interval, lowest: int, highest: int, some: int) -> tuple[int, int]:
    """Choose the smallest and the largest integer to draw, within `required` and the dtype's range.

    If `required` contains non-negative numbers, only these are drawn, because ids are not negative. Without an upper
    bound, at most `some` different numbers are drawn.
    """
    low, high = max(required[0], lowest), min(required[1], highest)
    first = math.ceil(max(low, 0) if high >= 0 else low)
    last = math.floor(high) if math.isfinite(required[1]) else min(first + some - 1, highest)
    return first, max(first, last)


class _BackwardSweep:
    """The requirements of the ops visited so far on each value."""

    def __init__(self, sizes: Mapping[Any, int], negative: bool) -> None:
        self.sizes = sizes
        self._negative = negative
        self._wanted: dict[Var, RequiredIntervals] = {}

    def get_requirements(self, var: Var) -> RequiredIntervals:
        return self._wanted.get(var, [ANY_VALUE])

    def get_interval(self, var: Var) -> Interval:
        return intersect_intervals(self.get_requirements(var))

    def add_requirement(self, var: Var | None, required: Sequence[Interval]) -> None:
        """Add the requirement `required` of one more user of `var`."""
        if not isinstance(var, Var) or all(each == ANY_VALUE for each in required):
            return
        known = self.get_requirements(var)
        if len(known) != len(required) and 1 not in (len(known), len(required)):
            known, required = [intersect_intervals(known)], [intersect_intervals(required)]
        count = max(len(known), len(required))
        pairs = zip(*(list(each) * count if len(each) == 1 else each for each in (known, required)))
        self._wanted[var] = [intersect_intervals(pair) for pair in pairs]

    def visit_block(self, block: Block) -> None:
        """Visit all ops of `block` from last to first, including those of nested blocks."""
        for op in reversed(list(block.operations)):
            if is_opaque(op):
                continue
            if op.blocks:
                self._visit_nested_blocks(op)
            if op.op_type in _REQUIREMENTS:
                for var, required in _REQUIREMENTS[op.op_type](op, self):
                    self.add_requirement(var, required)
            # Without requirements, nothing is propagated and no weight is read.
            if op.op_type in INVERSE_RULES and self._is_required(op) and _find_wrapped_index(op) is None:
                for var, required in INVERSE_RULES[op.op_type](op, self.get_requirements(op.outputs[0])):
                    self.add_requirement(var, required)

    def _is_required(self, op: Operation) -> bool:
        return any(each != ANY_VALUE for each in self.get_requirements(op.outputs[0]))

    def _visit_nested_blocks(self, op: Operation) -> None:
        looped = op.op_type == "while_loop"
        for inner in reversed(op.blocks[1:] if looped else op.blocks):
            for var, out in zip(inner.outputs, op.outputs):
                self.add_requirement(var, self.get_requirements(out))
        for inner in reversed(op.blocks):
            self.visit_block(inner)
            for var, operand in zip(inner.inputs, op.loop_vars if looped else ()):
                self.add_requirement(operand, self.get_requirements(var))

    def get_extent(self, dim: Any) -> int | None:
        """Return a dimension as a number, or None if it is dynamic."""
        if not is_symbolic(dim):
            return int(dim)
        found = dim.subs(dict(self.sizes))
        return int(found) if getattr(found, "is_Integer", False) else None

    def get_index_range(self, dim: Any) -> Interval:
        """Return the range of valid indices of an axis with the extent `dim`."""
        extent = self.get_extent(dim)
        return ANY_VALUE if extent is None else (-extent if self._negative else 0, extent - 1)


def _require_index_on_axis(table: str) -> Callable[[Operation, _BackwardSweep], OperandRequirements]:
    def require_indices(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
        if op.axis is not None and op.axis.val is not None:
            yield op.indices, [sweep.get_index_range(op.inputs[table].shape[int(op.axis.val)])]

    return require_indices


def _require_index_on_leading_axes(table: str) -> Callable[[Operation, _BackwardSweep], OperandRequirements]:
    def require_indices(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
        skipped = op.inputs.get("batch_dims")
        first = 0 if skipped is None else int(skipped.val)
        count = sweep.get_extent(op.indices.shape[-1])
        if count is not None:
            each = [sweep.get_index_range(dim) for dim in op.inputs[table].shape[first:first + count]]
            yield op.indices, each if op.indices.rank == 1 else [intersect_intervals(each)]

    return require_indices


def _require_one_hot_index(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
    size = op.one_hot_vector_size.val if isinstance(op.one_hot_vector_size, Var) else op.one_hot_vector_size
    if size is not None:
        yield op.indices, [sweep.get_index_range(int(size))]


def _require_slice_bounds(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
    """Yield requirements on begin and end of a slice for each axis; a bound whose mask is set is not read."""
    extents = [sweep.get_extent(dim) for dim in op.x.shape]
    for name, shift in (("begin", 0), ("end", 1)):
        mask = get_constant_value(op.inputs.get(f"{name}_mask"))
        unread = [False] * len(extents) if mask is None else np.atleast_1d(mask).tolist()
        yield op.inputs[name], [ANY_VALUE if extent is None or free else (shift, extent - 1 + shift)
                                for extent, free in zip(extents, unread)]


def _require_slice_begin(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
    sizes = get_constant_value(op.size)
    lengths = [1] * op.x.rank if sizes is None else [max(1, int(size)) for size in np.atleast_1d(sizes)]
    extents = [sweep.get_extent(dim) for dim in op.x.shape]
    yield op.begin, [ANY_VALUE if extent is None else (0, extent - size) for extent, size in zip(extents, lengths)]


def _require_mask_values(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
    """Require that the factor of a mask's constant is 0 or 1, such as 1 - m in (1 - m) * -10000."""
    for var, other in ((op.x, op.y), (op.y, op.x)):
        factor = get_constant_value(other)
        if factor is not None and np.size(factor) == 1 and np.asarray(factor).dtype.kind == "f" \
                and _is_mask_factor(float(np.max(factor))):
            yield var, [(0, 1)]


def _is_mask_factor(factor: float) -> bool:
    return factor <= -_MIN_NEGATIVE_MASK or factor >= _MIN_POSITIVE_MASK


def _require_flags(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
    """Require 0 or 1 of a number that is only used as a bool: coremltools declares bool inputs of a model as floats.

    Normal draws are never 0, and an attention mask of ones alone may make every element NaN.
    """
    if op.outputs[0].dtype == types.bool != op.x.dtype and all(
            user.op_type == "cast" and user.outputs[0].dtype == types.bool for user in op.x.child_ops):
        yield op.x, [(0, 1)]


def _require_share_of_sum(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
    """Require of each element of a sum its share of the interval of the sum: the last of N tokens is `sum(mask) - 1`.

    The share of a lower limit between 0 and 1 is 0: few draws of zeros and ones are all zeros.
    """
    axes = get_constant_value(op.axis if op.op_type == "cumsum" else op.axes)
    reduced = range(op.x.rank) if axes is None else np.atleast_1d(axes).tolist()
    count = math.prod(sweep.get_extent(op.x.shape[axis]) or math.nan for axis in reduced)
    if not math.isnan(count):
        low, high = (end / count for end in sweep.get_interval(op.outputs[0]))
        yield op.x, [(0 if 0 < low < 1 else low, high)]


def _require_wrapped_index(op: Operation, sweep: _BackwardSweep) -> OperandRequirements:
    """Require of `i` in an index mod(i + n, n), as of an index: `i` from 0 to n - 1, if `negative` from -n.

    The ops accept any integer, but what they replace, select(i >= 0, i, i + n), does not, nor does torch's embedding.
    """
    index = _find_wrapped_index(op)
    if index is not None and sweep.get_interval(op.outputs[0]) != ANY_VALUE:
        each = [sweep.get_index_range(int(extent)) for extent in np.atleast_1d(op.y.val)]
        yield index, each if index.rank == 1 else [intersect_intervals(each)]


def _find_wrapped_index(op: Operation) -> Var | None:
    """Find `i` of mod(i + n, n) with constant extents `n`, one or one for each coordinate; None for other ops."""
    if op.op_type != "mod" or op.x.op is None or op.x.op.op_type != "add":
        return None
    extents = get_constant_value(op.y)
    if extents is None or not types.is_int(op.y.dtype) or np.ndim(extents) > 1 or np.any(extents < 1):
        return None
    for index, other in ((op.x.op.x, op.x.op.y), (op.x.op.y, op.x.op.x)):
        if np.array_equal(get_constant_value(other), extents):
            return index
    return None


def _require_positive(name: str) -> Callable[[Operation, _BackwardSweep], OperandRequirements]:
    return lambda op, sweep: [(op.inputs[name], [(1, math.inf)])]


_REQUIREMENTS: dict[str, Callable[[Operation, _BackwardSweep], OperandRequirements]] = {
    "gather": _require_index_on_axis("x"),
    "gather_along_axis": _require_index_on_axis("x"),
    "scatter": _require_index_on_axis("data"),
    "scatter_along_axis": _require_index_on_axis("data"),
    "gather_nd": _require_index_on_leading_axes("x"),
    "scatter_nd": _require_index_on_leading_axes("data"),
    "one_hot": _require_one_hot_index,
    "slice_by_index": _require_slice_bounds,
    "slice_update": _require_slice_bounds,
    "slice_by_size": _require_slice_begin,
    "tile": _require_positive("reps"),
    "fill": _require_positive("shape"),
    "mul": _require_mask_values,
    "mod": _require_wrapped_index,
    "cast": _require_flags,
    "cumsum": _require_share_of_sum,
    "reduce_sum": _require_share_of_sum,
}
"Requirements on operands, by op type: for ops that select by index, for masks, casts to bool and sums."
