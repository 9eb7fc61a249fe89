"""Attributes of ops, and statistics of their weights, encoded for the page.

The work is limited, because weights may have any size. Of a large weight, only evenly spaced blocks of values are read.
When all weights together reach a limit, the remaining ones are described only by type and size. The page states both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.printer import format_literal, format_type, is_literal
from ...ir.query import count_stored_bytes, is_compressed, is_const, is_const_or_compressed

__all__ = ["AttributeTable"]

_MAX_SAMPLED = 1 << 16
"Most values of one weight that are read: enough for statistics of three digits. A larger weight is sampled in blocks."
# Number of blocks of a sample, evenly spaced from the start to the end of the weight: channels may differ in scale.
_BLOCKS = 16
_MAX_READ = 1 << 23
"Most values of all weights together that are read, which takes a tenth of a second."


class AttributeTable:
    """A table that stores each weight of a report once; ops refer to it by index.

    `texts` stores a text and returns its index.
    """

    def __init__(self, texts: Callable[[object], int]) -> None:
        self.weights: list[dict[str, Any]] = []
        self._texts = texts
        self._places: dict[Var, int] = {}
        self._left = _MAX_READ

    def encode(self, op: Operation) -> dict[str, list[int]]:
        """Encode the constant inputs of `op`: small ones as pairs (name, value), others as pairs (name, weight index).
        """
        attributes: list[int] = []
        weights: list[int] = []
        for name, var in _iterate_inputs(op):
            if not is_const_or_compressed(var):
                continue
            if is_const(var) and is_literal(var):
                attributes += [self._texts(name), self._texts(format_literal(var))]
            else:
                weights += [self._texts(name), self._find_place(var)]
        return {"attributes": attributes, "weights": weights}

    def _find_place(self, var: Var) -> int:
        if var not in self._places:
            self._places[var] = len(self.weights)
            self.weights.append(self._describe_value(var))
        return self._places[var]

    def _describe_value(self, var: Var) -> dict[str, Any]:
        made: dict[str, Any] = {"type": self._texts(format_type(var)), "name": self._texts(var.name)}
        if is_compressed(var):
            parts = [each for _, each in _iterate_inputs(var.op) if is_const(each)]
            stored = sum(map(count_stored_bytes, parts))
            return {**made, "bytes": stored, "compressed": self._texts(var.op.op_type.removeprefix("constexpr_")),
                    "dense": count_stored_bytes(var), "sampled": 0, "statistics": None}
        found, read = self._measure_weight(var)
        return {**made, "bytes": count_stored_bytes(var), "compressed": -1, "dense": None, "sampled": read,
                "statistics": found}

    def _measure_weight(self, var: Var) -> tuple[dict[str, Any] | None, int]:
        """Return statistics of a weight (None if it was not read) and the number of sampled values (0 for all)."""
        value = var.val
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or not value.size:
            return None, 0
        size = min(value.size, _MAX_SAMPLED)
        if size > self._left or not value.flags.c_contiguous:
            return None, 0
        self._left -= size
        return compute_statistics(sample_evenly(value, _MAX_SAMPLED)), size if size < value.size else 0


def _iterate_inputs(op: Operation) -> Iterator[tuple[str, Var]]:
    """Yield the inputs of `op` with their names; an element of a list is called `values[0]`."""
    for name, bound in op.inputs.items():
        if isinstance(bound, (list, tuple)):
            yield from ((f"{name}[{place}]", var) for place, var in enumerate(bound))
        elif isinstance(bound, Var) and not types.is_state(bound.sym_type):
            yield name, bound


def sample_evenly(value: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """Return all values of a contiguous array if it has at most `most`; else `most` values in evenly spaced blocks."""
    flat = value.reshape(-1)
    if flat.size <= most:
        return flat
    long = most // _BLOCKS
    starts = [place * (flat.size - long) // (_BLOCKS - 1) for place in range(_BLOCKS)]
    return np.concatenate([flat[start: start + long] for start in starts])


def compute_statistics(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Compute minimum, maximum, mean and standard deviation of the finite values; None if no value is finite.

    `zeros` and `nonfinite` are the fractions of all values that are zero, and that are infinite or NaN.
    """
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    made = {name: _round_number(float(getattr(finite, name)())) if finite.size else None
            for name in ("min", "max", "mean", "std")}
    return {**made, "zeros": _round_number(float(np.mean(wide == 0))),
            "nonfinite": _round_number(1 - finite.size / wide.size)}


def _round_number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
