"""Forecasts: predicted cost and support of a program in a few numbers, for the guard and for reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Program

from .plan import Plan, SupportCounts

__all__ = ["ChipLatency", "Forecast", "Forecaster"]


@dataclass(frozen=True)
class ChipLatency:
    """The estimated run time of a program on one chip, in microseconds, with its range.

    `call_us` is the part for the fixed cost of calls, `extrapolated_us` that of ops which no measurement of the chip
    covers.
    """

    chip: str
    latency_us: float
    latency_low_us: float
    latency_high_us: float
    call_us: float = 0.0
    extrapolated_us: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """Op counts and estimated times of a program on one target.

    `ops` are those that compute something, `unsupported` those known to be unsupported on the ANE, `unmeasured` those
    without evidence, `off` those predicted to be unsupported (the known ones, and unmeasured ones whose nearest
    evidence is negative). `cost` is the estimated time in ms, transitions included; `transitions` counts the changes
    of processor from one op to the next. `padded` is the size of all values in the ANE's layout, in bytes, 0 if not
    computed, and `peak` that of those which are live at the same time. `on_ane` are the ops predicted to run on the
    ANE, fewer than the supported ones in a small model, None if not predicted; `time_share` is the percentage of the
    estimated time spent there. `latency_us` is the estimated run time in microseconds, with its range, None if not
    computed: that of the middle chip where the target has several, and `latencies` has that of each.
    """

    ops: int
    unsupported: int
    off: int
    cost: float
    transitions: int
    padded: int = 0
    on_ane: int | None = None
    unmeasured: int = 0
    time_share: float = 0.0
    latency_us: float | None = None
    latency_low_us: float | None = None
    latency_high_us: float | None = None
    latency_term: str = ""
    latency_extrapolated: bool = False
    latencies: tuple[ChipLatency, ...] = ()
    peak: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Forecast:
        functions, support = {segment.function for segment in plan.segments}, plan.support
        return cls(
            ops=len(plan.rows), unsupported=support.unsupported,
            off=sum(not row.takes for row in plan.rows),
            cost=plan.total,
            transitions=max(0, len(plan.segments) - len(functions)),
            on_ane=sum(row.backend == "ane" for row in plan.rows),
            unmeasured=support.unmeasured,
            time_share=plan.time_share)

    @property
    def support(self) -> SupportCounts:
        return SupportCounts(self.unsupported, self.unmeasured)

    @property
    def possibly_unsupported(self) -> int:
        """The unmeasured ops whose nearest evidence is negative."""
        return self.off - self.unsupported

    @property
    def share(self) -> float:
        """Share of ops that are predicted to run on the ANE; 1 for a program without ops."""
        return (self.on_ane or 0) / self.ops if self.ops else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"ops": self.ops, "predicted_on_ane": self.on_ane, "ane_unsupported": self.unsupported,
                "ane_unknown": self.unmeasured, "off_ane": self.off, "est_ms": self.cost,
                "predicted_time_share": round(self.time_share, 2), "transitions": self.transitions,
                **({} if self.latency_us is None else {
                    "latency_us": self.latency_us, "latency_low_us": self.latency_low_us,
                    "latency_high_us": self.latency_high_us, "latency_term": self.latency_term,
                "latency_extrapolated": self.latency_extrapolated})}


Forecaster = Callable[[Program], Forecast]
"""Predicts the forecast of a program on the target of the rewrite."""
