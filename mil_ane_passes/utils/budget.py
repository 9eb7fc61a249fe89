"""Budgets: limits on loop steps, seconds and memory for the runs of a program, shared within one API call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

from .byte_size import parse_byte_size
from .errors import InputError, LimitReached
from .option_spelling import choose_spelling, format_option

__all__ = ["DEFAULT_MAX_STEPS", "Budget", "get_current_budget", "share_budget"]

DEFAULT_MAX_STEPS = 200_000
"""Default limit on the loop steps of one run.

A decoder takes some thousand steps, a scan over ten seconds of audio at 16 kHz takes 160,000. A loop that runs longer
is most likely endless. A step of a few ops takes some 0.1 ms, so such a loop is stopped within about half a minute.
"""
_PROGRESS_INTERVAL = 1.0
"Seconds between two progress messages of a loop."


class Budget:
    """Limits: seconds for all runs together, loop steps for each run, and bytes at once. None means no limit."""

    def __init__(
        self, max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None,
        progress: Callable[[str], None] | None = None, max_bytes: int | None = None,
    ) -> None:
        self.max_steps = max_steps
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self._progress = progress
        self._started = self._said = time.monotonic()
        self.deadline = math.inf if max_seconds is None else self._started + max_seconds

    @property
    def is_time_over(self) -> bool:
        """True once the deadline has passed."""
        return time.monotonic() > self.deadline

    def raise_time_exceeded(self, where: str) -> None:
        """Raise LimitReached: time ran out at `where`."""
        raise LimitReached(f"stopped after {self.max_seconds:g} s, at {where}: {format_option('max_seconds')}"
                           f"{choose_spelling(' ', '')}{self.max_seconds:g} is the limit")

    def raise_steps_exceeded(self, where: str, steps: int, seconds: float) -> None:
        """Raise LimitReached: the run took `steps` loop steps until `where`."""
        raise LimitReached(
            f"{where} is still running after {steps:,} loop steps in one run ({seconds:.1f} s); the limit is "
            f"{self.max_steps:,}. If the loop is not endless, raise it with "
            f"{choose_spelling('--max-steps N', 'max_steps=')}, or limit the time with "
            f"{choose_spelling('--max-seconds S', 'max_seconds=')}")

    def report(self, text: Callable[[], str]) -> None:
        """Report the progress of a long run, at most once per `_PROGRESS_INTERVAL`."""
        now = time.monotonic()
        if self._progress is not None and now - self._said >= _PROGRESS_INTERVAL:
            self._said = now
            self._progress(text())


_active_budget: ContextVar[Budget | None] = ContextVar("mil_ane_passes.budget", default=None)


def get_current_budget() -> Budget:
    """Return the budget of the current call, or a new one with the default limits."""
    return _active_budget.get() or Budget()


@contextmanager
def share_budget(
    max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None,
    progress: Callable[[str], None] | None = None, max_memory: str | float | None = None,
) -> Iterator[Budget]:
    """Share one budget among all runs inside the `with`; `max_memory` is a number of bytes, or a text such as "8GB".

    Raises InputError for limits that are not positive numbers.
    """
    _check_limit("max_steps", max_steps, Integral)
    _check_limit("max_seconds", max_seconds, Real)
    most = None if max_memory is None else parse_byte_size(max_memory, "max_memory")
    budget = Budget(max_steps, max_seconds, progress, most)
    token = _active_budget.set(budget)
    try:
        yield budget
    finally:
        _active_budget.reset(token)


def _check_limit(name: str, given: Any, kind: Any) -> None:
    """Raise InputError for a limit that is neither None nor a number above 0."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, kind) or not given > 0:
        expected = "a whole number" if kind is Integral else "a number of seconds"
        raise InputError(f"{format_option(name)}{choose_spelling(' ', '')}{given}: expected {expected} above 0, or "
                         f"{choose_spelling('none', 'None')} for no limit")
