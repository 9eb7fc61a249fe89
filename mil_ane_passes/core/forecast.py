"""What a program is predicted to cost and to lose, in a few numbers: what a guard and a before and after go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Program

from .plan import Plan

__all__ = ["Forecast", "Foresee"]


@dataclass(frozen=True)
class Forecast:
    """`ops` are those that compute something, `refused` those that the ANE is known not to take, `off` those that it is
    predicted not to take (refused ones, and unknown ones that the nearest evidence speaks against). `cost` is the
    predicted cost in ms, changes of place included, `switches` how often the place changes from one op to the next.
    `padded` is what all values take as the ANE lays them out, in bytes; 0 where that was not computed. `on_ane` are the
    ops that are predicted to run on the ANE, which a small model's need not, though it takes them; None: not predicted.
    """

    ops: int
    refused: int
    off: int
    cost: float
    switches: int
    padded: int = 0
    on_ane: int | None = None

    @classmethod
    def of(cls, plan: Plan) -> Forecast:
        functions = {segment.function for segment in plan.segments}
        return cls(
            ops=len(plan.rows), refused=sum(row.ane == "no" for row in plan.rows),
            off=sum(not row.takes for row in plan.rows),
            cost=plan.total,
            switches=max(0, len(plan.segments) - len(functions)),
            on_ane=sum(row.backend == "ane" for row in plan.rows))

    def to_dict(self) -> dict[str, Any]:
        return {"ops": self.ops, "refused": self.refused, "off_ane": self.off, "est_ms": self.cost,
                "switches": self.switches}


Foresee = Callable[[Program], Forecast]
"""Predicts a program, for the target that is rewritten for."""
