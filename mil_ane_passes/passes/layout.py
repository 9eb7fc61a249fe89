"""ANE memory of a tensor by the 64-byte row rule.

Source: Apple, coreai-models `neural_engine_rules.md` (the last axis of inputs and outputs is contiguous and aligned to
64 bytes; a singleton last axis costs 32x at fp16) and eiln/ane (M1 Linux driver: row and plane strides are multiples
of 64 bytes). Shapes of lower rank are left-padded with ones to N, C, H, W. For higher ranks no source states the
layout, and all leading extents count as the batch. Computed, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

__all__ = ["ROW_BYTES", "TILE_BYTES", "compute_buffer_bytes", "compute_padded_bytes", "format_bytes"]

ROW_BYTES = 64
"Alignment of rows, by both sources."
TILE_BYTES = 16384
"Size to which a buffer is rounded up by the driver of eiln/ane for an M1."


def compute_padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Compute the bytes of a buffer of `shape` with its last axis padded to a multiple of 64 bytes.

    `itemsize` is in bytes.
    """
    if not shape:
        return ROW_BYTES
    row = -(-shape[-1] * itemsize // ROW_BYTES) * ROW_BYTES
    return prod(shape[:-1]) * row


def compute_buffer_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Compute the bytes of an entire buffer of `shape`: `compute_padded_bytes`, rounded up to 16 KiB."""
    return -(-compute_padded_bytes(shape, itemsize) // TILE_BYTES) * TILE_BYTES


def format_bytes(count: int) -> str:
    """Format bytes in decimal units: `29.5 MB`, `3.1 kB`, `64 B`."""
    for unit, scale in (("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            digits = 1 if count >= 10 * scale else 2
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count} B"
