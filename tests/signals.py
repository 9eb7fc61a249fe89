"""Children that hear signals, however the tests themselves were started."""

from __future__ import annotations

import signal


def hears_signals() -> None:
    """For `preexec_fn`: what nohup and jobs in the background ignore reaches the child all the same."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
