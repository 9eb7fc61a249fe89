"""Plans: the predicted execution of a program, with support, estimated cost and backend of each op, and the segments.

All of it is predicted. The costs are what Core ML's segmenter is predicted to estimate on an M4, not run times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from coremltools.converters.mil.mil import Operation, Program

from .rule_class import RuleFailure
from .targets import Generation

__all__ = [
    "ANE_OUTPUT_MS",
    "ENTER_ANE_MS",
    "TRANSITION_MS",
    "Backend",
    "Cost",
    "Engine",
    "Plan",
    "Row",
    "Segment",
    "SupportCounts",
    "SupportStatus",
]

ENTER_ANE_MS, TRANSITION_MS, ANE_OUTPUT_MS = 0.125, 0.125, 0.125
"""Milliseconds: to enter an ANE segment, for each transition, for each graph output on the ANE."""

SupportStatus = Literal["yes", "no", "unknown"]
Backend = Literal["ane", "cpu"]
Engine = Literal["ane", "bnns", "classic_cpu"]


@dataclass(frozen=True)
class Cost:
    """Estimates in milliseconds; None where a backend does not support the op. `guess`: not based on a measured row."""

    ane: float | None
    bnns: float
    classic: float
    guess: bool = False

    @property
    def cpu(self) -> float:
        """The lower cost of the two CPU backends."""
        return min(self.bnns, self.classic)

    def repeated(self, times: int) -> Cost:
        """Return the cost of `times` executions."""
        return replace(self, ane=None if self.ane is None else self.ane * times, bnns=self.bnns * times,
                       classic=self.classic * times)

    def of(self, engine: Engine) -> float:
        found = {"ane": self.ane, "bnns": self.bnns, "classic_cpu": self.classic}[engine]
        return float("inf") if found is None else found


@dataclass
class Row:
    """One op of a plan; consts have no row.

    `index` counts the ops of its function in program order, nested blocks included.

    `takes` is the support that the prediction uses: "unknown" is replaced by the answer that the nearest evidence
    suggests. `reported`: a rule reports the op as unsupported, or as not known to be supported.
    """

    function: str
    index: int
    op: Operation
    depth: int
    ane: SupportStatus
    takes: bool
    cost: Cost
    reason: str = ""
    backend: Backend = "cpu"
    engine: Engine = "bnns"
    codes: list[str] = field(default_factory=list)
    reported: bool = False


@dataclass(frozen=True)
class SupportCounts:
    """The ops of a program that are unsupported on the ANE of the target, and those for which that is not known.

    Every report counts them by `Plan.support`, and `str()` is how texts state them ("" for none).
    """

    unsupported: int
    unmeasured: int

    def __str__(self) -> str:
        counts = {"unsupported": self.unsupported, "unmeasured": self.unmeasured}
        parts = [f"{number} {what}" for what, number in counts.items() if number]
        last = self.unmeasured or self.unsupported
        return f"{' and '.join(parts)} {'op' if last == 1 else 'ops'}" if parts else ""


@dataclass(frozen=True)
class Segment:
    """Consecutive ops of one function on one backend, from the first to the last row index, both included."""

    function: str
    backend: Backend
    first: int
    last: int
    milliseconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"function": self.function, "backend": self.backend, "first": self.first, "last": self.last,
                "ops": self.last - self.first + 1, "est_ms": self.milliseconds}


@dataclass
class Plan:
    """The predicted execution of a program on `generations`; `package` is the package it was loaded from, if any."""

    program: Program
    generations: Sequence[Generation]
    rows: list[Row]
    segments: list[Segment]
    package: Any = None
    total: float = 0.0
    "Estimated milliseconds of all functions: their ops, entering the ANE, transitions, and outputs from the ANE."
    failed: list[RuleFailure] = field(default_factory=list)
    "The rules that failed on the program; their findings are missing."
    sizes: Mapping[str, Any] = field(default_factory=dict)
    "The sizes of the values of each function that the estimates use (`ane.sizes.Sizes`)."

    @property
    def support(self) -> SupportCounts:
        """The counts of unsupported and unmeasured ops."""
        return SupportCounts(sum(row.ane == "no" for row in self.rows), sum(row.ane == "unknown" for row in self.rows))

    @property
    def time_share(self) -> float:
        """Percentage of the ops' estimated time that is spent on the ANE; percentage of the ops if none takes time."""
        spent = {"ane": 0.0, "cpu": 0.0}
        for segment in self.segments:
            spent[segment.backend] += segment.milliseconds
        if total := sum(spent.values()):
            return 100.0 * spent["ane"] / total
        return 100.0 * sum(row.backend == "ane" for row in self.rows) / max(len(self.rows), 1)

    def of(self, function: str) -> list[Row]:
        """Return the rows of one function, by index."""
        return [row for row in self.rows if row.function == function]
