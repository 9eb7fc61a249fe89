"""Limits on the resources that a package may require: a small file must not cost much memory.

Packages beyond them are rejected, or parts of them left unevaluated.
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
"The largest manifest in bytes: it is read and parsed at once."
MAX_DEBUG_HANDLES_BYTES = 1 << 24
"The largest mapping of debug handles in bytes that is parsed, some 80,000 ops; a larger one is copied as it is."
MAX_ELEMENTS = (1 << 63) - 1
"The most elements a type may have: the largest signed 64-bit integer."
MAX_RANK = 32
"The highest rank passed to pymil; Core ML supports five to eight. A type of higher rank is kept, but not interpreted."
MAX_EVALUATED_ELEMENTS = 1 << 20
"The most elements of an op's outputs that are evaluated while a package is loaded."
MAX_EVALUATED_IN_PACKAGE = 1 << 22
"The most elements that are evaluated for a package."


def count_elements(shape: Iterable[Any]) -> int:
    """Return the number of elements of a shape over its known dimensions; a dimension of 0 counts as 1."""
    return math.prod(max(size, 1) for size in shape if isinstance(size, int))


class EvaluationBudget:
    """Elements that may still be evaluated for one package: at most `each` for one op's outputs, `in_all` in total."""

    def __init__(self, each: int = MAX_EVALUATED_ELEMENTS, in_all: int = MAX_EVALUATED_IN_PACKAGE) -> None:
        self._each, self._left = each, in_all

    def allows(self, count: int) -> bool:
        """Return whether an op with outputs of `count` elements may be evaluated."""
        return count <= min(self._each, self._left)

    def spend(self, count: int) -> None:
        """Subtract `count` evaluated elements."""
        self._left -= count
