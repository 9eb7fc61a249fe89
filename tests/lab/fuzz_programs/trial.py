"""One random program through `ane.rewrite`, `ane.rewrite` again, and `ane.lint`."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

import mil_ane_passes as ane
from mil_ane_passes.commands.rewrite_steps import combine_promises
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.clone import clone_program

from .draft import RandomProgram

__all__ = ["TARGETS", "Failure", "Outcome", "run_trial"]

TARGETS = ("m4", "m1")
_MAX_SECONDS = 120
"Processor time of one program above which it counts as hung."
_SEED_COUNT = 6
"Seeds at which a result that the equivalence check rejects is judged again, at float64."


@dataclass(frozen=True)
class Failure:
    """What went wrong with a program on a target.

    `kind`: "false alarm" (rejected, and equal at float64), "out of range" (equal at float64, but not finite at fp16
    where it was), "different" (at float64, by more than the rewrites declare), "not verified", "crash" (an exception,
    or a rule that failed and was rolled back), "hang" or "not idempotent".
    """

    seed: int
    target: str
    kind: str
    rule: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "target": self.target, "kind": self.kind, "rule": self.rule, "reason": self.reason}

    def __str__(self) -> str:
        return f"seed {self.seed} on {self.target}: {self.kind} {self.rule}: {self.reason}"


@dataclass
class Outcome:
    """The result of one program on all its targets."""

    statuses: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def run_trial(drawn: RandomProgram) -> Outcome:
    """Rewrite `drawn` for each target with the equivalence check on, and look for failures."""
    outcome = Outcome()
    for target in dict.fromkeys((*TARGETS, *drawn.targets)):
        try:
            with _limit_time():
                _try_on_target(drawn, target, outcome)
        except TimeoutError:
            outcome.failures.append(Failure(drawn.seed, target, "hang", "", f"more than {_MAX_SECONDS} s"))
        except Exception as error:  # any exception is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            outcome.failures.append(Failure(drawn.seed, target, "crash", f"{where.filename.rsplit('/', 1)[-1]}:"
                                                                         f"{where.lineno}", line[:300]))
    return outcome


def _try_on_target(drawn: RandomProgram, target: str, outcome: Outcome) -> None:
    ane.lint(clone_program(drawn.program), target=target)
    settings: dict[str, Any] = {"preset": "full", "target": target, "max_growth": None}  # single ops never gain
    if drawn.feeds:
        settings["feeds"] = drawn.feeds
    report = ane.rewrite(drawn.program, **settings)
    outcome.statuses[report.status] += 1
    for failed in report.failed:
        outcome.failures.append(Failure(drawn.seed, target, "crash", failed.rule, str(failed)[:300]))
    outcome.fired.update(trace.rule for trace in report.traces for _ in trace.fired)
    for blamed in report.left_out_passes:
        if _overflows_on_its_feeds(drawn):  # what a rewrite makes of that is rightly rejected
            outcome.statuses["overflows before"] += 1
        else:
            outcome.failures.append(_classify_rejection(drawn, target, settings, blamed.rule, blamed.reason))
    if report.status == "not verified":
        reason = report.verify.reason if report.verify is not None else ""
        rule = report.faulty_pass.rule if report.faulty_pass else ""
        outcome.failures.append(Failure(drawn.seed, target, "not verified", rule, reason))
    elif report.changed and not report.left_out_passes:
        again = ane.rewrite(report.package, verify=False, **settings)
        if again.changed:
            rules = sorted({trace.rule for trace in again.traces if trace.fired})
            outcome.failures.append(Failure(drawn.seed, target, "not idempotent", ", ".join(rules),
                                            "fires on its own result"))


def _classify_rejection(drawn: RandomProgram, target: str, settings: dict[str, Any], rule: str, reason: str) -> Failure:
    """Judge what the equivalence check rejected: at float64, on other draws."""
    report = ane.rewrite(drawn.program, verify=False, **settings)
    verdict = compare_programs(
        drawn.program, report.package, seeds=_SEED_COUNT, exactness=combine_promises(report.traces), locate=False
    )
    kind = "false alarm" if verdict.equal else "different" if verdict.status == "different" else "not verified"
    if kind == "false alarm" and _has_new_nonfinite(drawn, report.package):
        kind = "out of range"
    return Failure(drawn.seed, target, kind, rule, reason)


def _overflows_on_its_feeds(drawn: RandomProgram) -> bool:
    """Whether the program has infinite or NaN results at fp16 on the feeds that it was drawn with."""
    if not drawn.feeds:
        return False
    outputs = ane.run(drawn.program, drawn.feeds, precision="float16")
    return any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in outputs.values())


def _has_new_nonfinite(drawn: RandomProgram, after: Any) -> bool:
    """Whether anything finite at fp16 before is not finite after."""
    verdict = compare_programs(drawn.program, after, seeds=_SEED_COUNT, precisions=("float64", "float16"), locate=False)
    return any(np.isfinite(output.before) and not np.isfinite(output.after)
               for case in verdict.cases if case.precision == "float16" for output in case.failed)


@contextmanager
def _limit_time() -> Iterator[None]:
    """Raise TimeoutError in what takes more than `_MAX_SECONDS` of processor time."""
    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    held: Callable[..., Any] | int | None = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, held)
