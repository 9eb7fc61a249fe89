"""Padding by constants: the amounts by axis, and constants of one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.block_editor import get_first_op
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic

__all__ = ["build_border_const", "concat_slabs", "count_border_bytes", "count_slab_bytes", "read_pad_amounts"]

_PadAmounts = dict[int, tuple[int, int]]
"Numbers of elements before and after each axis that is padded."
_FP16_BYTES = 2
"Bytes of an fp16 number."


def read_pad_amounts(op: Operation) -> _PadAmounts | None:
    """Return the pads of `op`; None where they are dynamic."""
    flat = get_const_value(op.pad)
    if flat is None:
        return None
    first = op.x.rank - len(flat) // 2
    pairs = {first + number: (flat[2 * number], flat[2 * number + 1]) for number in range(len(flat) // 2)}
    return {axis: pair for axis, pair in pairs.items() if any(pair)}


def count_border_bytes(x: Var, padded: _PadAmounts) -> int | None:
    """Count the bytes of `build_border_const`; None where an axis that is padded is symbolic."""
    extents = [x.shape[axis] for axis in padded]
    if any(map(is_symbolic, extents)):
        return None
    return _FP16_BYTES * math.prod(int(extent) + sum(pair) for extent, pair in zip(extents, padded.values()))


def count_slab_bytes(x: Var, padded: _PadAmounts) -> int | None:
    """Count the bytes that `concat_slabs` adds; None where the extent of another axis of a slab is symbolic."""
    total, extents = 0, list(x.shape)
    for axis, pair in padded.items():
        beside = [extent for number, extent in enumerate(extents) if number != axis]
        if any(map(is_symbolic, beside)):
            return None
        total += _FP16_BYTES * sum(set(pair)) * math.prod(map(int, beside))
        extents[axis] += sum(pair)
    return total


def build_border_const(mb: RewriteBuilder, x: Var, padded: _PadAmounts, fill: float) -> Var:
    """Build a constant of `fill` around -0.0, which changes no number when added, zeros of both signs included."""
    shape = tuple(int(x.shape[axis]) + sum(padded[axis]) if axis in padded else 1 for axis in range(x.rank))

    def make() -> np.ndarray[Any, Any]:
        held = np.full(shape, fill, np.float16)
        held[tuple(slice(padded[axis][0], extent - padded[axis][1]) if axis in padded else slice(None)
                   for axis, extent in enumerate(shape))] = -0.0
        return held

    return _build_shared_const(mb, ("border", _encode_fill_bits(fill), shape, tuple(padded.items())), make)


def concat_slabs(mb: RewriteBuilder, x: Var, padded: _PadAmounts, fill: float) -> Var:
    """Concat blocks of `fill` to `x`, one axis after the other."""
    for axis, (before, behind) in padded.items():
        shape = [int(extent) if number != axis else 0 for number, extent in enumerate(x.shape)]
        values = [*_build_slab(mb, shape, axis, before, fill), x, *_build_slab(mb, shape, axis, behind, fill)]
        x = mb.concat(values=values, axis=axis)
    return x


def _build_slab(mb: RewriteBuilder, beside: Sequence[int], axis: int, amount: int, fill: float) -> list[Var]:
    """Build a block `amount` thick along `axis`, or none for 0."""
    shape = tuple(amount if number == axis else extent for number, extent in enumerate(beside))
    return (
        [_build_shared_const(mb, ("slab", _encode_fill_bits(fill), shape), lambda: np.full(shape, fill, np.float16))]
        if amount
        else []
    )


def _build_shared_const(mb: RewriteBuilder, key: Any, make: Callable[[], np.ndarray[Any, Any]]) -> Var:
    """Return the constant called `key`, shared by all its users in this block."""

    def made() -> Any:
        with mb.at(get_first_op(mb.block), key[0]):
            return mb.const(val=make())

    constant: Var = mb.once(key, made)
    return constant


def _encode_fill_bits(fill: float) -> bytes:
    """Return the bits of `fill`, which differ for 0.0 and -0.0 and are equal for NaN and itself."""
    return np.float16(fill).tobytes()
