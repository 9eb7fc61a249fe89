"""Limits on the resources that a package may require: a small file must not cause a large allocation.

A package beyond a limit is rejected, or the part of it beyond the limit is not evaluated.
"""

from __future__ import annotations

__all__ = [
    "MAX_DEBUG_HANDLES_BYTES",
    "MAX_ELEMENTS",
    "MAX_MANIFEST_BYTES",
    "MAX_MODEL_BYTES",
]

MAX_MODEL_BYTES = (1 << 31) - 1
"The largest model file in bytes: the limit of a protobuf message."
MAX_MANIFEST_BYTES = 1 << 22
"Largest manifest in bytes, as it is parsed in memory. A real one has about 1 KB; 4 MB is a damaged or hostile file."
MAX_DEBUG_HANDLES_BYTES = 1 << 24
"Largest mapping of debug handles, in bytes, that is parsed: enough for about 80,000 ops. A larger one is copied as is."
MAX_ELEMENTS = (1 << 63) - 1
"The most elements a type may have: the largest signed 64-bit integer."
