"""Inside a worker process: an interrupt ends the job that runs, and the process does not outlive its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from ..core.host import importing
from ..package.staging import abandon

__all__ = ["begin", "busy"]

_LAST_WORDS = 60.0
"Seconds for a job to clean up after its parent has died."


class _State:
    at_work = False
    interrupted = False
    idle = threading.Event()


def begin() -> None:
    """Starts a worker; runs in its main thread, with interrupts blocked."""
    _State.idle.set()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_watch_parent, daemon=True).start()


def busy(job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of `job`, which an interrupt ends."""
    _State.idle.clear()
    _State.at_work, _State.interrupted = True, False
    try:
        return job(*args, **kwargs)
    finally:
        _State.at_work = False
        _State.idle.set()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Once for each job: a second interrupt must not end the cleaning up."""
    if _State.at_work and not _State.interrupted:
        _State.interrupted = True
        if importing(frame):  # which may swallow whatever is raised
            abandon()
            os._exit(1)
        raise KeyboardInterrupt


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes it from whatever it waits for
        _State.idle.wait(_LAST_WORDS)
        os._exit(1)
