"""What one rule did to one program, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .contract import Exactness, Finding, Hit, Miss, Rewrite, Rule
from .scopes import origin

__all__ = ["PassTrace", "note"]


@dataclass
class PassTrace:
    """What one rule did to one program. `strength` is the weakest exactness among the forms that fired."""

    rule: str
    fired: list[Finding] = field(default_factory=list)
    near_misses: list[Finding] = field(default_factory=list)
    strength: Exactness | None = None
    mends: bool = False
    "Whether a form fired that may make finite what was infinite or NaN."
    moves: float = 0.0
    "How far outputs may move at full precision, as a share of an output's largest value, besides rounding."
    replaced: dict[str, str] = field(default_factory=dict)
    "Names of values that are gone, and of the ones that were there already and took their place."
    rounds: int = 0
    ops_before: int = 0
    ops_after: int = 0
    seconds: float = 0.0
    undone: str = ""
    "Why a guard undid it; then nothing of it is left, and `places` says how many it had fired at."
    places: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "pass": self.rule,
            "fired": [finding.to_dict() for finding in self.fired],
            "near_misses": [finding.to_dict() for finding in self.near_misses],
            "exactness": self.strength.value if self.strength else None,
            "mends": self.mends,
            "moves": self.moves,
            "rounds": self.rounds,
            "ops_before": self.ops_before,
            "ops_after": self.ops_after,
            "seconds": round(self.seconds, 6),
            **({"undone": self.undone, "places": self.places} if self.undone else {}),
        }


def note(trace: PassTrace, rule: Rule, function: str, answer: Hit | Miss) -> None:
    """Add an answer of `rule` to its trace."""
    op = answer.op
    value = op.outputs[0].name if op.outputs else op.name
    where = origin(op)
    if isinstance(answer, Hit):
        trace.fired.append(
            Finding(rule.name, rule.code, rule.slug, function, op.op_type, value, answer.note, origin=where))
        if isinstance(rule, Rewrite):
            strength = answer.exactness or rule.exactness
            order = list(Exactness)
            if trace.strength is None or order.index(strength) > order.index(trace.strength):
                trace.strength = strength
            trace.mends |= rule.mends
            trace.moves = max(trace.moves, answer.facts.get("moves", rule.moves))
    elif answer.near:
        trace.near_misses.append(
            Finding(rule.name, rule.code, rule.slug, function, op.op_type, value, answer.reason, near_miss=True,
                    origin=where))
