"""Value ranges measured in runs, for rules whose decision needs more than the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Program, Var

__all__ = ["Measure", "MeasuredRanges", "Range"]


@dataclass(frozen=True)
class Range:
    """Range of one value over all runs, computed at float32.

    `low` and `high` are over the finite elements (both 0 if there are none), `smallest` is the smallest magnitude
    other than 0 (0 if there is none). `finite` is True if all elements are. `partial`, for convolutions and matrix
    products, bounds every partial sum in any order of summation: the largest sum of the magnitudes of the products of
    one element, the bias included.
    """

    low: float = 0.0
    high: float = 0.0
    smallest: float = 0.0
    finite: bool = True
    partial: float | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


class MeasuredRanges(dict[Var, Range]):
    """The ranges of a program's values, and the runs they come from.

    `error` runs another program with the same interface in the precision of its types (float16) and returns the error
    of its outputs, relative to each output's largest value (for integers, the share that differs): the largest of
    them, infinite if numbers are lost. `runs` describes these runs.
    """

    def __init__(self, ranges: Mapping[Var, Range], error: Callable[[Program], float], runs: Sequence[Any] = ()
                 ) -> None:
        super().__init__(ranges)
        self.error, self.runs = error, runs


Measure = Callable[[Program], Mapping[Var, Range]]
"""Runs a program on the available feeds: a range for every value with numbers, inputs included."""
