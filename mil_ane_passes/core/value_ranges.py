"""What values were in runs: the facts that a rule decides by when the program alone does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Program, Var

__all__ = ["Measure", "MeasuredRanges", "Range"]


@dataclass(frozen=True)
class Range:
    """One value over all runs, computed at float32.

    `low` and `high` are over the finite elements (both 0 when there are none), `smallest` is the smallest magnitude
    other than 0 (0 when there is none). `finite` says whether all elements are. `partial`, of convolutions and matrix
    products, bounds every partial sum in whatever order it is formed: the largest sum of the magnitudes of the
    products of one element, the bias included.
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

    `error` runs another program with the same interface as its types say (float16) and gives how far its outputs are
    off, as a share of each output's largest value (of integers, the share that differs): the largest of them, infinite
    where numbers are lost. `runs` says which runs these were.
    """

    def __init__(self, ranges: Mapping[Var, Range], error: Callable[[Program], float], runs: Sequence[Any] = ()
                 ) -> None:
        super().__init__(ranges)
        self.error, self.runs = error, runs


Measure = Callable[[Program], Mapping[Var, Range]]
"""Runs a program on the feeds at hand: a range for every value with numbers, inputs included."""
