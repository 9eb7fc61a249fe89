"""The amounts of a pad by axis."""

from __future__ import annotations

from coremltools.converters.mil.mil import Operation

from ...ir.query import get_const_value

__all__ = ["PadAmounts", "read_pad_amounts"]

PadAmounts = dict[int, tuple[int, int]]
"Numbers of elements before and after each axis that is padded."


def read_pad_amounts(op: Operation) -> PadAmounts | None:
    """Return the pads of `op`; None where they are dynamic."""
    flat = get_const_value(op.pad)
    if flat is None:
        return None
    first = op.x.rank - len(flat) // 2
    pairs = {first + number: (flat[2 * number], flat[2 * number + 1]) for number in range(len(flat) // 2)}
    return {axis: pair for axis, pair in pairs.items() if any(pair)}
