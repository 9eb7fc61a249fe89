"""Pass traces: the changes of one rule to one program, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .contract import Exactness, Hit, Miss, Rewrite, Rule
from .finding import Finding, build_finding
from .rule_class import RuleFailure, check_answer

__all__ = ["Change", "PassTrace", "record_result"]


_ROUNDED = 2.0**-40
"""Share of a result's largest value by which a rewrite that only rounds may move it: far above float64 rounding and
far below any other error."""


@dataclass(frozen=True)
class Change:
    """Guarantee of a rewrite for one op that it replaced, which the check propagates through the later ops.

    Its result moves by at most `moves` times the largest of its `moves_of` ("operands" or "result"). With `raises` its
    scalar constants from 0 to below 2^-24 are read as 2^-24, except where an operand is exactly 0. Operands above
    `reach` are not covered. `rounds` means that it fixes nothing and gives the same result up to rounding. `ulps` is
    how many units in the last place of its dtype the result may be off in addition.
    """

    function: str
    op_type: str
    value: str
    moves: float = 0.0
    moves_of: str = "result"
    raises: bool = False
    reach: float = math.inf
    rounds: bool = False
    ulps: float = 0.0

    @classmethod
    def of(cls, rule: Rewrite, finding: Finding, strength: Exactness, moves: float, ulps: float) -> Change:
        """Build the guarantee of `rule` for `finding`; `moves` and `ulps` are how far its results may move."""
        rounds = strength is Exactness.ROUNDING
        declared = moves if rule.moves_of else 0.0
        return cls(finding.function, finding.op, finding.value, declared or (_ROUNDED if rounds else 0.0),
                   rule.moves_of if declared else "result", rule.raises_constants, rule.reach,
                   rounds and not rule.fixes_nonfinite, ulps)

    @property
    def says(self) -> bool:
        """True if the guarantee is not trivial."""
        return bool(self.moves or self.raises or self.reach < math.inf)


@dataclass
class PassTrace:
    """The changes of one rule to one program. `strength` is the weakest exactness among the forms that fired."""

    rule: str
    fired: list[Finding] = field(default_factory=list)
    near_misses: list[Finding] = field(default_factory=list)
    strength: Exactness | None = None
    fixes_nonfinite: bool = False
    "True if a form fired that may make infinite or NaN values finite."
    moves: float = 0.0
    "How far outputs may move at full precision, relative to an output's largest value, besides rounding."
    ulps: float = 0.0
    """How many units in the last place results may be off in the stored dtype, besides the original program's error."""
    within: tuple[float, float] = (0.0, math.inf)
    "Magnitudes of the model's inputs between which all forms that fired keep their guarantee."
    largest_size: float = math.inf
    "The largest size of a symbolic dimension that the forms that fired support, set by a user's option."
    smallest_size: int = 1
    "The smallest such size."
    keeps_nonfinite: bool = True
    "True if NaN and infinity reach the same results, by the guarantees of the forms that fired."
    changes: list[Change] = field(default_factory=list)
    "Guarantees for single ops, for the check to propagate."
    replaced: dict[str, str] = field(default_factory=dict)
    "Names of removed values, and of the existing values that replaced them."
    rounds: int = 0
    ops_before: int = 0
    ops_after: int = 0
    seconds: float = 0.0
    reverted: str = ""
    "Reason why the guard reverted it. Then none of its changes remain, and `places` is the number of matches it had."
    places: int = 0
    failed: RuleFailure | None = None
    "Position and reason of the rule's failure. Then none of its changes remain."

    def extend(self, later: PassTrace) -> None:
        """Add the results of another run of the same rule."""
        known = {(miss.function, miss.value) for miss in self.near_misses}
        self.fired += later.fired
        self.near_misses += [miss for miss in later.near_misses if (miss.function, miss.value) not in known]
        self.strength = max((each for each in (self.strength, later.strength) if each is not None),
                            key=list(Exactness).index, default=None)
        self.fixes_nonfinite |= later.fixes_nonfinite
        self.moves = max(self.moves, later.moves)
        self.ulps = max(self.ulps, later.ulps)
        self.within = (max(self.within[0], later.within[0]), min(self.within[1], later.within[1]))
        self.largest_size = min(self.largest_size, later.largest_size)
        self.smallest_size = max(self.smallest_size, later.smallest_size)
        self.keeps_nonfinite &= later.keeps_nonfinite
        self.changes += later.changes
        self.replaced |= later.replaced
        self.rounds = max(self.rounds, later.rounds)
        self.ops_after += later.ops_after - later.ops_before
        self.seconds += later.seconds
        self.failed = self.failed or later.failed

    def to_dict(self) -> dict[str, Any]:
        return {
            "pass": self.rule,
            "fired": [{**finding.summarize(), "origin": finding.origin.to_dict() if finding.origin else None}
                      for finding in self.fired],
            "near_misses": [finding.summarize() for finding in self.near_misses],
            "exactness": self.strength.value if self.strength else None,
            "fixes_nonfinite": self.fixes_nonfinite,
            "moves": self.moves,
            "rounds": self.rounds,
            "ops_before": self.ops_before,
            "ops_after": self.ops_after,
            "seconds": round(self.seconds, 6),
            **({"reverted": self.reverted, "places": self.places} if self.reverted else {}),
            **({"failed": self.failed.to_dict()} if self.failed else {}),
        }


def record_result(trace: PassTrace, rule: Rule, function: str, answer: Hit | Miss) -> None:
    """Add an answer of `rule` to its trace; raises RuleError for anything else."""
    check_answer(rule, answer)
    if isinstance(answer, Hit):
        trace.fired.append(build_finding(rule, answer, function))
        if isinstance(rule, Rewrite):
            strength = answer.exactness or rule.exactness
            order = list(Exactness)
            if trace.strength is None or order.index(strength) > order.index(trace.strength):
                trace.strength = strength
            trace.fixes_nonfinite |= answer.facts.get("fixes_nonfinite", rule.fixes_nonfinite)
            moves = answer.facts.get("moves", rule.moves)
            trace.moves = max(trace.moves, moves)
            ulps = answer.facts.get("ulps", rule.ulps)
            change = Change.of(rule, trace.fired[-1], strength, answer.facts.get("moves_at_op", moves), ulps)
            trace.changes += [change] * change.says
            trace.ulps = max(trace.ulps, ulps)
            low, high = answer.facts.get("within", rule.within)
            trace.within = (max(trace.within[0], low), min(trace.within[1], high))
            trace.largest_size = min(trace.largest_size, answer.facts.get("largest_size", math.inf))
            trace.smallest_size = max(trace.smallest_size, answer.facts.get("smallest_size", 1))
            trace.keeps_nonfinite &= answer.facts.get("keeps_nonfinite", rule.keeps_nonfinite)
    elif answer.near:
        trace.near_misses.append(build_finding(rule, answer, function))
