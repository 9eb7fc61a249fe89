"""Constants in fp16: converted piece by piece, once for all constants of the same bytes, and the loss by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var

__all__ = ["FP16_MAX", "FP16_MIN_SUBNORMAL", "INFINITY_THRESHOLD", "Fp16Constants", "MagnitudeSummary"]

Array = np.ndarray[Any, Any]

FP16_MAX = 65504.0
"The largest finite number of fp16."
FP16_MIN_SUBNORMAL = 2.0**-24
"The smallest positive number of fp16."
INFINITY_THRESHOLD = 1e38
"Magnitude from which an fp32 number is read as infinity: masks are filled with such numbers."

_CHUNK_ELEMENTS = 1 << 20
"Elements of a constant that are converted or examined at once."
_MAX_ELEMENTS_TO_CLAMP = 400
"""Most elements of a constant in which numbers that fp16 flushes to 0 are raised to its smallest number.

This is the limit of coremltools' conversion.
"""


@dataclass(frozen=True)
class MagnitudeSummary:
    """Magnitudes in an fp32 constant: the largest below `INFINITY_THRESHOLD`, and whether finite ones are beyond."""

    largest: float = 0.0
    beyond: bool = False

    @property
    def is_below_fp16(self) -> bool:
        """Return whether all numbers are smaller than the smallest of fp16, 0 and infinities aside."""
        return not self.beyond and 0 < self.largest < FP16_MIN_SUBNORMAL


class Fp16Constants:
    """Constants as fp16.

    Two constants with the same array, or the same bytes in other shapes, share the converted bytes.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._extents: dict[tuple[int, int], tuple[Array, MagnitudeSummary]] = {}

    def value(self, var: Var) -> Array:
        """Return const `var` in fp16."""
        given = np.asarray(var.val)
        key = _make_buffer_key(given)
        if key not in self._values:
            self._values[key] = given, _convert_to_fp16(given)  # keeping the array alive keeps its address unique
        return self._values[key][1].reshape(given.shape)

    def extent(self, var: Var) -> MagnitudeSummary:
        """Summarize the magnitudes in const `var`."""
        given = np.asarray(var.val)
        key = _make_buffer_key(given)
        if key not in self._extents:
            self._extents[key] = given, _summarize_magnitudes(given)
        return self._extents[key][1]


def _make_buffer_key(value: Array) -> tuple[int, int]:
    return int(value.__array_interface__["data"][0]), value.nbytes


def _split_into_chunks(value: Array) -> list[slice]:
    return [slice(start, start + _CHUNK_ELEMENTS) for start in range(0, value.size, _CHUNK_ELEMENTS)]


def _convert_to_fp16(value: Array) -> Array:
    flat = np.ascontiguousarray(value).reshape(-1)
    made = np.empty(flat.size, np.float16)
    for piece in _split_into_chunks(flat):
        with np.errstate(over="ignore"):
            made[piece] = flat[piece]
    if flat.size < _MAX_ELEMENTS_TO_CLAMP:
        lost = (made == 0) & (flat != 0)
        made[lost] = np.copysign(np.float16(FP16_MIN_SUBNORMAL), flat[lost])
    made.flags.writeable = False
    return made


def _summarize_magnitudes(value: Array) -> MagnitudeSummary:
    flat = np.ascontiguousarray(value).reshape(-1)
    largest, beyond = 0.0, False
    for piece in _split_into_chunks(flat):
        sizes = np.abs(flat[piece])
        plain = sizes[sizes < INFINITY_THRESHOLD]
        largest = max(largest, float(plain.max(initial=0.0)))
        beyond |= bool(np.any((sizes >= INFINITY_THRESHOLD) & (sizes < math.inf)))
    return MagnitudeSummary(largest, beyond)
