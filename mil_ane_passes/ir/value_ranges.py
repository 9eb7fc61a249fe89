"""Value ranges measured in runs, for rules that cannot decide from the program alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Program, Var

__all__ = ["Measure", "MeasuredRanges", "Range"]


@dataclass(frozen=True)
class Range:
    """Range of one value over all runs, computed at float32.

    `low` and `high` are the bounds of the finite elements (both 0 without finite elements). `smallest` is the smallest
    magnitude except 0 (0 if all elements are 0). `finite` is True if all elements are finite. `partial`, for
    convolutions and matrix products, is a bound on every partial sum in any order of summation: for each output
    element, the magnitudes of its products and of the bias are summed, and `partial` is the largest such sum.
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
    """The ranges of a program's values, and the runs in which they were measured.

    `error` runs another program with the same interface in the precision of its types (float16), and returns the
    largest error of its outputs. The error of an output is relative to its largest value; for integers, it is the
    fraction of elements that differ. It is infinite if finite numbers became infinite or NaN. `runs` describes them.
    """

    def __init__(self, ranges: Mapping[Var, Range], error: Callable[[Program], float], runs: Sequence[Any] = ()
                 ) -> None:
        super().__init__(ranges)
        self.error, self.runs = error, runs


Measure = Callable[[Program], Mapping[Var, Range]]
"""Runs a program on the available feeds and returns a range for every numeric value, including inputs."""
