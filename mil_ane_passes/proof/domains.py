"""Which whole numbers an input may hold: what it selects (rows of a table, places in a cache) has to be there.

One sweep from a function's last op to its first: what an op asks of its result becomes what it asks of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..core.query import is_opaque
from .steps import ANYTHING, STEPS, Asked, Interval, Wanted, known, meet

__all__ = ["domains", "whole_numbers"]

_MASK, _BEYOND = 5000.0, 65504.0
"A factor below minus the one, or from the other on (no number of fp16 but 0 survives it), makes a mask."


def domains(function: Function, sizes: Mapping[Any, int], negative: bool = False) -> dict[str, Interval]:
    """For each input of `function` the interval its values have to be in; `sizes` are the extents of its symbols.
    With `negative`, indices that count from the end of an axis are in it.

    Followed through casts, changes of shape, selections, nested blocks and arithmetic with constants; what else happens
    to an input asks nothing of it.
    """
    sweep = _Sweep(sizes, negative)
    sweep.block(function)
    return {name: sweep.interval(var) for name, var in function.inputs.items()}


def whole_numbers(wanted: Interval, lowest: int, highest: int, some: int) -> tuple[int, int]:
    """The smallest and the largest number to draw: in `wanted` and the dtype's range, not negative where that will do
    (an id is not), and no more than `some` numbers where nothing bounds them from above."""
    low, high = max(wanted[0], lowest), min(wanted[1], highest)
    first = math.ceil(max(low, 0) if high >= 0 else low)
    last = math.floor(high) if math.isfinite(wanted[1]) else min(first + some - 1, highest)
    return first, max(first, last)


class _Sweep:
    """What is wanted of each value by the ops that were met so far."""

    def __init__(self, sizes: Mapping[Any, int], negative: bool) -> None:
        self.sizes = sizes
        self._negative = negative
        self._wanted: dict[Var, Wanted] = {}

    def of(self, var: Var) -> Wanted:
        return self._wanted.get(var, [ANYTHING])

    def interval(self, var: Var) -> Interval:
        return meet(self.of(var))

    def want(self, var: Var | None, wanted: Sequence[Interval]) -> None:
        """Note what one more reader wants of `var`."""
        if not isinstance(var, Var) or all(each == ANYTHING for each in wanted):
            return
        known = self.of(var)
        if len(known) != len(wanted) and 1 not in (len(known), len(wanted)):
            known, wanted = [meet(known)], [meet(wanted)]
        count = max(len(known), len(wanted))
        pairs = zip(*(list(each) * count if len(each) == 1 else each for each in (known, wanted)))
        self._wanted[var] = [meet(pair) for pair in pairs]

    def block(self, block: Block) -> None:
        """All ops of `block`, last one first, those of nested blocks in their place."""
        for op in reversed(list(block.operations)):
            if is_opaque(op):
                continue
            if op.blocks:
                self._nested(op)
            if op.op_type in _PLACES:
                for var, wanted in _PLACES[op.op_type](op, self):
                    self.want(var, wanted)
            if op.op_type in STEPS and self._asked(op):  # else nothing to hand on, and no weight to be read for it
                for var, wanted in STEPS[op.op_type](op, self.of(op.outputs[0])):
                    self.want(var, wanted)

    def _asked(self, op: Operation) -> bool:
        return any(each != ANYTHING for each in self.of(op.outputs[0]))

    def _nested(self, op: Operation) -> None:
        looped = op.op_type == "while_loop"
        for inner in reversed(op.blocks[1:] if looped else op.blocks):
            for var, out in zip(inner.outputs, op.outputs):
                self.want(var, self.of(out))
        for inner in reversed(op.blocks):
            self.block(inner)
            for var, given in zip(inner.inputs, op.loop_vars if looped else ()):
                self.want(given, self.of(var))

    def extent(self, dim: Any) -> int | None:
        """A dimension as a number, or None when it depends on what is not known."""
        if not is_symbolic(dim):
            return int(dim)
        found = dim.subs(dict(self.sizes))
        return int(found) if getattr(found, "is_Integer", False) else None

    def below(self, dim: Any) -> Interval:
        """An index into an axis of that extent."""
        extent = self.extent(dim)
        return ANYTHING if extent is None else (-extent if self._negative else 0, extent - 1)


def _on_axis(table: str) -> Callable[[Operation, _Sweep], Asked]:
    def asked(op: Operation, sweep: _Sweep) -> Asked:
        if op.axis is not None and op.axis.val is not None:
            yield op.indices, [sweep.below(op.inputs[table].shape[int(op.axis.val)])]

    return asked


def _on_leading_axes(table: str) -> Callable[[Operation, _Sweep], Asked]:
    def asked(op: Operation, sweep: _Sweep) -> Asked:
        skipped = op.inputs.get("batch_dims")
        first = 0 if skipped is None else int(skipped.val)
        count = sweep.extent(op.indices.shape[-1])
        if count is not None:
            each = [sweep.below(dim) for dim in op.inputs[table].shape[first:first + count]]
            yield op.indices, each if op.indices.rank == 1 else [meet(each)]

    return asked


def _one_hot(op: Operation, sweep: _Sweep) -> Asked:
    size = op.one_hot_vector_size.val if isinstance(op.one_hot_vector_size, Var) else op.one_hot_vector_size
    if size is not None:
        yield op.indices, [sweep.below(int(size))]


def _slice(op: Operation, sweep: _Sweep) -> Asked:
    """Begin and end of a slice, axis by axis; where a mask is set they are not read."""
    extents = [sweep.extent(dim) for dim in op.x.shape]
    for name, shift in (("begin", 0), ("end", 1)):
        mask = known(op.inputs.get(f"{name}_mask"))
        unread = [False] * len(extents) if mask is None else np.atleast_1d(mask).tolist()
        yield op.inputs[name], [ANYTHING if extent is None or free else (shift, extent - 1 + shift)
                                for extent, free in zip(extents, unread)]


def _slice_by_size(op: Operation, sweep: _Sweep) -> Asked:
    sizes = known(op.size)
    given = [1] * op.x.rank if sizes is None else [max(1, int(size)) for size in np.atleast_1d(sizes)]
    extents = [sweep.extent(dim) for dim in op.x.shape]
    yield op.begin, [ANYTHING if extent is None else (0, extent - size) for extent, size in zip(extents, given)]


def _mask(op: Operation, sweep: _Sweep) -> Asked:
    """What a mask's constant is multiplied by, as in (1 - m) * -10000, says where it applies: 0 or 1."""
    for var, other in ((op.x, op.y), (op.y, op.x)):
        factor = known(other)
        if factor is not None and np.size(factor) == 1 and np.asarray(factor).dtype.kind == "f" \
                and _stands_for_a_mask(float(np.max(factor))):
            yield var, [(0, 1)]


def _stands_for_a_mask(factor: float) -> bool:
    return factor <= -_MASK or factor >= _BEYOND


def _counts(name: str) -> Callable[[Operation, _Sweep], Asked]:
    return lambda op, sweep: [(op.inputs[name], [(1, math.inf)])]


_PLACES: dict[str, Callable[[Operation, _Sweep], Asked]] = {
    "gather": _on_axis("x"), "gather_along_axis": _on_axis("x"), "scatter": _on_axis("data"),
    "scatter_along_axis": _on_axis("data"), "gather_nd": _on_leading_axes("x"), "scatter_nd": _on_leading_axes("data"),
    "one_hot": _one_hot, "slice_by_index": _slice, "slice_update": _slice, "slice_by_size": _slice_by_size,
    "tile": _counts("reps"), "fill": _counts("shape"), "mul": _mask,
}
"Ops that select by number, or mask: what they ask of the numbers."
