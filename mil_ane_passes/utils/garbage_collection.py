"""Pausing of Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_garbage_collection"]


class _Pauses:
    """Threads that have paused the collector, one entry per pause.

    When the last pause ends, the collector is re-enabled.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads: list[int] = []
        self.was_enabled = False


_pauses = _Pauses()


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the collector while modules are imported, or a graph is built or rewritten.

    That work makes many objects and drops few, and each full collection would scan all of them again, which makes the
    cost grow faster than their number.
    """
    pauses, thread = _pauses, threading.get_ident()
    with pauses.lock:
        if not pauses.threads:
            pauses.was_enabled = gc.isenabled()
        pauses.threads.append(thread)
        gc.disable()
    try:
        yield
    finally:
        with pauses.lock:
            if thread in pauses.threads:  # not in a process forked inside the `with`
                pauses.threads.remove(thread)
            if not pauses.threads and pauses.was_enabled:
                gc.enable()


def _restore_in_child() -> None:
    """Drop the pauses of threads that a forked process does not have."""
    thread = threading.get_ident()
    _pauses.lock = threading.Lock()
    left = [each for each in _pauses.threads if each == thread]
    if _pauses.threads and not left and _pauses.was_enabled:
        gc.enable()
    _pauses.threads = left


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_restore_in_child)
