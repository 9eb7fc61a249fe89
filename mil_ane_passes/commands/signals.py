"""Stop signals: Ctrl-C, SIGTERM and SIGHUP end a run at once, with a one-line message and without leftover files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from ..passes.coremltools_setup import is_importing

__all__ = ["Stopped", "handle_stop_signals", "report_stopped"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_stopping = False


class Stopped(KeyboardInterrupt):
    """A stop signal was received; `code` is its exit code in shells: 128 and the signal's number."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


def report_stopped(stopped: KeyboardInterrupt) -> int:
    """Report that the run was stopped; returns the exit code."""
    found = stopped if isinstance(stopped, Stopped) else Stopped()
    why = "interrupted" if found.code == 128 + signal.SIGINT else str(found)
    print(f"mil-ane-passes: {why}; no partial output was written", file=sys.stderr, flush=True)
    return found.code


@contextmanager
def handle_stop_signals() -> Iterator[None]:
    """Handle stop signals in a process of our own: they raise Stopped, so that everything is closed on the way out.

    During an import, the process removes what is being staged and ends at once instead, because an import may swallow
    the exception. A second signal does the same, and a signal during a finalizer, whose exceptions Python ignores. Once
    the run is over, a signal ends the process without a message. Signals that are ignored stay ignored (nohup).
    """
    global _stopping
    _stopping = False
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise_stopped)
    report_ignored = sys.unraisablehook
    sys.unraisablehook = partial(_end_if_stopped, report_ignored)
    try:
        yield
    finally:
        sys.unraisablehook = report_ignored
        for number in _SIGNALS:
            if signal.getsignal(number) == _raise_stopped:
                signal.signal(number, signal.SIG_DFL)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    global _stopping
    stopped, again, _stopping = Stopped(number), _stopping, True
    if again or is_importing(frame):
        _end_at_once(stopped)
    raise stopped


def _end_if_stopped(report_ignored: Callable[[Any], Any], ignored: Any) -> None:
    """End the process if Python ignores a stop signal, which was raised in a finalizer; else report what is ignored."""
    if isinstance(ignored.exc_value, Stopped):
        _end_at_once(ignored.exc_value)
    report_ignored(ignored)


def _end_at_once(stopped: Stopped) -> NoReturn:
    """Remove what is being staged, and end the process with a message."""
    # Not imported here: that may be the very import the signal came in, and then nothing is being staged yet.
    abandon = getattr(sys.modules.get("mil_ane_passes.package.staging"), "close_all_stagings", None)
    if abandon is not None:
        abandon()
    os._exit(report_stopped(stopped))
