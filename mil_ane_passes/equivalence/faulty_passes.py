"""Search for the pass that breaks an equivalence check.

A faulty pass of a preset is left out; one that was requested by name is only reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..passes.contract import Rewrite
from ..passes.pass_trace import PassTrace
from ..utils.text_format import format_count
from .equivalence import VerifyReport

__all__ = ["MAX_PASSES_LEFT_OUT", "Attempt", "FaultyPass", "VerificationOutcome", "apply_and_verify"]

MAX_PASSES_LEFT_OUT = 8
"The most passes that are left out, each at the cost of a few short equivalence checks and a full one."


class Attempt(Protocol):
    """The result of applying rules to a fresh clone of a program."""

    traces: list[PassTrace]


@dataclass(frozen=True)
class FaultyPass:
    """A pass that breaks the equivalence check: the program is verified equivalent before it, and no longer after it.

    `places` is the number of matches at which it fired; `verify` is the equivalence check that failed.
    """

    rule: str
    places: int
    verify: VerifyReport

    @property
    def reason(self) -> str:
        """The failure, in one line."""
        case = next((case for case in self.verify.cases if case.failed), None)
        if case is None:
            return self.verify.reason
        return f"{case.function}, {case.feeds}, {case.precision}: {case.failed[0]}"

    @property
    def where(self) -> str:
        """The first op that differs, if it is known."""
        first = self.verify.first
        return f"; the first op that differs: {first.after.op_type} %{first.after.value}" if first else ""

    def to_dict(self) -> dict[str, Any]:
        first = self.verify.first
        return {"pass": self.rule, "places": self.places, "reason": self.reason,
                "first_difference": first.to_dict() if first else None}

    def __str__(self) -> str:
        return f"at {format_count(self.places, 'place')}: {self.reason}{self.where}"


@dataclass
class VerificationOutcome:
    """The rules that are left and their result, its equivalence check, and the passes that break equivalence checks.

    `verify` is None if nothing fired. `faulty_pass` is a faulty pass that must not be left out, as it was requested by
    name.
    """

    rules: Sequence[Rewrite]
    made: Any
    verify: VerifyReport | None = None
    left_out: list[FaultyPass] = field(default_factory=list)
    faulty_pass: FaultyPass | None = None


def apply_and_verify(
    rules: Sequence[Rewrite], apply: Callable[..., Any], prove: Callable[..., VerifyReport],
    progress: Callable[[str], None],
) -> VerificationOutcome:
    """Apply the rules and verify the result; leave out passes that break the equivalence check, and verify again.

    `apply(rules, guard=...)` makes an `Attempt`, and `prove(attempt, like=..., only=..., locate=...)` verifies it at
    the strictness of `like` (default: itself), in one run (function, feeds) only, and with or without a search for the
    first difference. If the program cannot be verified even unchanged, no pass is blamed; the reason is in `verify`.
    """
    kept = list(rules)
    left_out: list[FaultyPass] = []
    while True:
        made = apply(kept, guard=True)
        if not any(trace.fired for trace in made.traces):
            return VerificationOutcome(kept, made, None, left_out)
        verify = prove(made)
        if verify.equal or _is_unverifiable(verify, apply, prove) or len(left_out) == MAX_PASSES_LEFT_OUT:
            return VerificationOutcome(kept, made, verify, left_out)
        culprit, blamed = _find_faulty_pass(kept, made, verify, apply, prove, progress)
        if culprit.asked:
            return VerificationOutcome(kept, made, verify, left_out, blamed)
        progress(f"ane::{culprit.name} breaks the equivalence check; going on without it")
        kept.remove(culprit)
        left_out.append(blamed)


def _is_unverifiable(verify: VerifyReport, apply: Callable[..., Any], prove: Callable[..., VerifyReport]) -> bool:
    """Return whether the program before cannot be verified equivalent to itself; if so, write that into `verify`."""
    if verify.status == "different":  # both ran
        return False
    alone = prove(apply((), guard=False))
    if alone.equal:
        return False
    verify.reason = f"the model cannot be verified even as it is, before any pass: {alone.reason}"
    return True


def _find_faulty_pass(
    rules: Sequence[Rewrite], made: Attempt, verify: VerifyReport, apply: Callable[..., Any],
    prove: Callable[..., VerifyReport], progress: Callable[[str], None],
) -> tuple[Rewrite, FaultyPass]:
    """Find the first rule with which the equivalence check fails, by bisection, in the first failed run if one
    failed."""
    traces = {trace.rule: trace for trace in made.traces if trace.fired}
    fired = [rule for rule in rules if rule.name in traces]
    failed = next((case for case in verify.cases if case.failed), None)
    only = None if failed is None else (failed.function, failed.feeds)
    good, bad = 0, len(fired)  # the first `good` rules are verified, the first `bad` are not
    while bad - good > 1:
        progress(f"not verified: which of {bad - good} passes is to blame?")
        middle = (good + bad) // 2
        trial = prove(apply(fired[:middle], guard=False), like=made, only=only, locate=False)
        if trial.equal or (only and trial.status != "different"):  # one run need not enter every block
            good = middle
        else:
            bad = middle
    if bad < len(fired):
        verify = prove(apply(fired[:bad], guard=False), like=made, only=only)
    culprit = fired[bad - 1]
    return culprit, FaultyPass(culprit.name, len(traces[culprit.name].fired), verify)
