"""Constants in fp16: made once for all that show the same bytes, a piece at a time, and what is lost by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var

__all__ = ["INFINITE", "LARGEST", "SMALLEST", "Extent", "Halves"]

Array = np.ndarray[Any, Any]

LARGEST = 65504.0
"The largest number of fp16."
SMALLEST = 2.0**-24
"The smallest one of fp16 above 0."
INFINITE = 1e38
"From this magnitude on a number of fp32 stands for infinity: masks are filled with them."

_PIECE = 1 << 20
_FEW = 400
"Elements up to which those that would be 0 in fp16 become its smallest number, as in the host's conversion."


@dataclass(frozen=True)
class Extent:
    """What an fp32 constant holds: its largest magnitude below `INFINITE`, and whether there are finite ones beyond."""

    largest: float = 0.0
    beyond: bool = False

    @property
    def vanishes(self) -> bool:
        """Whether fp16 has no number as small as what they are, 0 and infinities aside."""
        return not self.beyond and 0 < self.largest < SMALLEST


class Halves:
    """Constants as fp16. Two that show the same array, or the same bytes in other shapes, get the same bytes again."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._extents: dict[tuple[int, int], tuple[Array, Extent]] = {}

    def value(self, var: Var) -> Array:
        """Const `var` in fp16."""
        given = np.asarray(var.val)
        key = _key(given)
        if key not in self._values:
            self._values[key] = given, _halved(given)  # the array is kept, so that its address stays its own
        return self._values[key][1].reshape(given.shape)

    def extent(self, var: Var) -> Extent:
        """What const `var` holds."""
        given = np.asarray(var.val)
        key = _key(given)
        if key not in self._extents:
            self._extents[key] = given, _extent(given)
        return self._extents[key][1]


def _key(value: Array) -> tuple[int, int]:
    return int(value.__array_interface__["data"][0]), value.nbytes


def _pieces(value: Array) -> list[slice]:
    return [slice(start, start + _PIECE) for start in range(0, value.size, _PIECE)]


def _halved(value: Array) -> Array:
    flat = np.ascontiguousarray(value).reshape(-1)
    made = np.empty(flat.size, np.float16)
    for piece in _pieces(flat):
        with np.errstate(over="ignore"):
            made[piece] = flat[piece]
    if flat.size < _FEW:
        lost = (made == 0) & (flat != 0)
        made[lost] = np.copysign(np.float16(SMALLEST), flat[lost])
    made.flags.writeable = False
    return made


def _extent(value: Array) -> Extent:
    flat = np.ascontiguousarray(value).reshape(-1)
    largest, beyond = 0.0, False
    for piece in _pieces(flat):
        sizes = np.abs(flat[piece])
        plain = sizes[sizes < INFINITE]
        largest = max(largest, float(plain.max(initial=0.0)))
        beyond |= bool(np.any((sizes >= INFINITE) & (sizes < math.inf)))
    return Extent(largest, beyond)
