"""Limits on the resources that a package may require: a small file must not cause a large allocation.

A package beyond a limit is rejected, or the part of it beyond the limit is not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = [
    "MAX_DEBUG_HANDLES_BYTES",
    "MAX_ELEMENTS",
    "MAX_EVALUATED_ELEMENTS",
    "MAX_EVALUATED_IN_PACKAGE",
    "MAX_MANIFEST_BYTES",
    "MAX_MODEL_BYTES",
    "MAX_RANK",
    "EvaluationBudget",
    "count_elements",
]

MAX_MODEL_BYTES = (1 << 31) - 1
"The largest model file in bytes: the limit of a protobuf message."
MAX_MANIFEST_BYTES = 1 << 22
"Largest manifest in bytes, as it is parsed in memory. A real one has about 1 KB; 4 MB is a damaged or hostile file."
MAX_DEBUG_HANDLES_BYTES = 1 << 24
"Largest mapping of debug handles, in bytes, that is parsed: enough for about 80,000 ops. A larger one is copied as is."
MAX_ELEMENTS = (1 << 63) - 1
"The most elements a type may have: the largest signed 64-bit integer."
MAX_RANK = 32
"Highest rank passed to pymil. Core ML supports ranks 5 to 8, depending on the op; a type of higher rank stays opaque."
MAX_EVALUATED_ELEMENTS = 1 << 20
"Most elements of an op's outputs that are evaluated while a package is loaded: shape computations have far fewer."
MAX_EVALUATED_IN_PACKAGE = 1 << 22
"Most elements that are evaluated for one package: four ops of the largest size, or thousands of shape computations."


def count_elements(shape: Iterable[Any]) -> int:
    """Return the number of elements of a shape over its known dimensions; a dimension of 0 counts as 1."""
    return math.prod(max(size, 1) for size in shape if isinstance(size, int))


class EvaluationBudget:
    """Number of elements that may still be evaluated for a package: at most `each` per op, and `in_all` in total."""

    def __init__(self, each: int = MAX_EVALUATED_ELEMENTS, in_all: int = MAX_EVALUATED_IN_PACKAGE) -> None:
        self._each, self._left = each, in_all

    def can_evaluate(self, count: int) -> bool:
        """Return whether an op with outputs of `count` elements may be evaluated."""
        return count <= min(self._each, self._left)

    def spend_elements(self, count: int) -> None:
        """Subtract `count` evaluated elements."""
        self._left -= count
