"""How many steps of loops and how many seconds the runs of a program may take, for the time of one call of the API."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .errors import InputError, LimitReached
from .option_spelling import choose_spelling, format_option

__all__ = ["DEFAULT_MAX_STEPS", "Budget", "get_current_budget", "share_budget"]

DEFAULT_MAX_STEPS = 200_000
"""Steps of loops that one run may take unless more are allowed.

A decoder takes some thousand steps, a scan over ten seconds of audio at 16 kHz takes 160,000. A loop that goes on
longer is most likely endless; a step of a few ops takes some 0.1 ms, so it is stopped within about half a minute.
"""
_PROGRESS_INTERVAL = 1.0
"Seconds between two words on how far a loop is."


class Budget:
    """What all runs together may take in seconds, and each run in steps of loops; None for no limit."""

    def __init__(
        self, max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.max_steps = max_steps
        self.max_seconds = max_seconds
        self._progress = progress
        self._started = self._said = time.monotonic()
        self.deadline = math.inf if max_seconds is None else self._started + max_seconds

    @property
    def is_time_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def raise_time_exceeded(self, where: str) -> None:
        """Raises LimitReached: the time was over at `where`."""
        raise LimitReached(f"stopped after {self.max_seconds:g} s, at {where}: {format_option('max_seconds')}"
                           f"{choose_spelling(' ', '')}{self.max_seconds:g} allows no more")

    def raise_steps_exceeded(self, where: str, steps: int, seconds: float) -> None:
        """Raises LimitReached: the run took `steps` steps of loops until `where`."""
        raise LimitReached(
            f"{where} is still running after {steps:,} steps of loops in one run ({seconds:.1f} s); a run may take "
            f"{self.max_steps:,}. If the loop is not endless, allow more with "
            f"{choose_spelling('--max-steps N', 'max_steps=')}, or limit the time with "
            f"{choose_spelling('--max-seconds S', 'max_seconds=')}")

    def report(self, text: Callable[[], str]) -> None:
        """Tell the caller how far a long run is, now and then."""
        now = time.monotonic()
        if self._progress is not None and now - self._said >= _PROGRESS_INTERVAL:
            self._said = now
            self._progress(text())


_active_budget: ContextVar[Budget | None] = ContextVar("mil_ane_passes.budget", default=None)


def get_current_budget() -> Budget:
    """The budget of the call that is under way, else a new one with the usual limits."""
    return _active_budget.get() or Budget()


@contextmanager
def share_budget(
    max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Budget]:
    """Let all runs inside the `with` share one budget. Raises InputError for limits that are not positive numbers."""
    _check_limit("max_steps", max_steps, int)
    _check_limit("max_seconds", max_seconds, (int, float))
    budget = Budget(max_steps, max_seconds, progress)
    token = _active_budget.set(budget)
    try:
        yield budget
    finally:
        _active_budget.reset(token)


def _check_limit(name: str, given: Any, kinds: Any) -> None:
    """Raises InputError for a limit that is neither None nor a number above 0."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, kinds) or not given > 0:
        kind = "a whole number" if kinds is int else "a number of seconds"
        raise InputError(f"{format_option(name)}{choose_spelling(' ', '')}{given}: expected {kind} above 0, or "
                         f"{choose_spelling('none', 'None')} for no limit")
