"""Code inside a worker process: an interrupt ends the running job, and the process does not outlive its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from ..package.staging import close_all_stagings
from ..passes.coremltools_setup import is_importing

__all__ = ["run_interruptibly", "start_worker"]

_CLEANUP_SECONDS = 60.0
"Seconds for a job to clean up after its parent has died."


class _WorkerState:
    is_busy = False
    interrupted = False
    idle = threading.Event()


def start_worker() -> None:
    """Initialize a worker; runs in its main thread, with interrupts blocked."""
    _WorkerState.idle.set()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _handle_interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_watch_parent, daemon=True).start()


def run_interruptibly(job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `job` and return its result; an interrupt ends it."""
    _WorkerState.idle.clear()
    _WorkerState.is_busy, _WorkerState.interrupted = True, False
    try:
        return job(*args, **kwargs)
    finally:
        _WorkerState.is_busy = False
        _WorkerState.idle.set()


def _handle_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once for each job: a second interrupt must not stop the cleanup."""
    if _WorkerState.is_busy and not _WorkerState.interrupted:
        _WorkerState.interrupted = True
        if is_importing(frame):  # an import may swallow the exception
            close_all_stagings()
            os._exit(1)
        raise KeyboardInterrupt


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # interrupts any wait of the main thread
        _WorkerState.idle.wait(_CLEANUP_SECONDS)
        os._exit(1)
