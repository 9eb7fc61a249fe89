"""What a tensor costs in ANE memory, by the 64-byte row rule.

Source: Apple, coreai-models `neural_engine_rules.md` (the last axis of inputs and outputs is contiguous and aligned to
64 bytes; a singleton last axis costs 32x at fp16) and eiln/ane (M1 Linux driver: row and plane strides are multiples
of 64 bytes). Shapes of lower rank are taken as left-padded with ones to N, C, H, W. Computed, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

__all__ = ["ROW_BYTES", "padded_bytes", "size_text"]

ROW_BYTES = 64


def padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a buffer of `shape` whose last axis is padded to a multiple of 64 bytes; `itemsize` in bytes."""
    if not shape:
        return ROW_BYTES
    row = -(-shape[-1] * itemsize // ROW_BYTES) * ROW_BYTES
    return prod(shape[:-1]) * row


def size_text(count: int) -> str:
    """`29.5 MB`, `3.1 kB`, `64 B` (decimal units)."""
    for unit, scale in (("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            digits = 1 if count >= 10 * scale else 2
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count} B"
