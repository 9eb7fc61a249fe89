"""How much a package may ask for before it is refused or left unevaluated: a small file must not cost much memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = [
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
"The largest model file: that of a protobuf message."
MAX_MANIFEST_BYTES = 1 << 22
MAX_ELEMENTS = (1 << 63) - 1
"The most elements a type may have: what 64 bits count."
MAX_RANK = 32
"Dimensions that pymil is shown; Core ML takes five to eight. A type with more is kept and not looked into."
MAX_EVALUATED_ELEMENTS = 1 << 20
"The most elements of an op's outputs that are evaluated while a package is loaded."
MAX_EVALUATED_IN_PACKAGE = 1 << 22
"The most elements that are evaluated for a package."


def count_elements(shape: Iterable[Any]) -> int:
    """How many elements a shape has as far as it is known; an empty dimension hides no other."""
    return math.prod(max(size, 1) for size in shape if isinstance(size, int))


class EvaluationBudget:
    """What may still be evaluated for one package: elements of `each` op's outputs, and of all."""

    def __init__(self, each: int = MAX_EVALUATED_ELEMENTS, in_all: int = MAX_EVALUATED_IN_PACKAGE) -> None:
        self._each, self._left = each, in_all

    def allows(self, count: int) -> bool:
        """Whether an op with outputs of `count` elements may be evaluated."""
        return count <= min(self._each, self._left)

    def spend(self, count: int) -> None:
        """That many elements were evaluated."""
        self._left -= count
