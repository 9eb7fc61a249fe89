"""Meets coremltools: imports it and registers our passes, unless we are the command, which does so when it needs to.

As a command we own the terminal: what coremltools logs while it is imported (the Mac-only libraries it misses
elsewhere, a torch newer than it was tested with) would stand above every message of ours. And work that does not
need coremltools (help, the copy of large files) can begin before its import, which takes a second. As a library we
keep quiet about nothing and put nothing off.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from .garbage_collection import pause_garbage_collection

__all__ = [
    "WORKER_VARIABLE",
    "freeze_imported_objects",
    "is_importing",
    "register_with_coremltools",
    "silence_coremltools",
]

WORKER_VARIABLE = "MIL_ANE_PASSES_WORKER"
"""Set in the environment of processes that only do single jobs for a batch; they are like the command."""

_COMMAND = "mil-ane-passes"
_RUN_AS_MODULE = frozenset({"-m", "__main__"})


def register_with_coremltools(guard: Any = None) -> None:
    """Register every rewrite with coremltools as `ane::<name>`; nothing as the command, which imports when it needs.

    `guard` as for `register_passes`.
    """
    if not _is_command_process():
        with pause_garbage_collection():
            from .pipeline import register_passes

            register_passes(guard)


def freeze_imported_objects() -> None:
    """As the command, spare the collector what has been imported: coremltools and torch are half a million objects,
    which stay to the end, and to look through them once takes longer than to rewrite a model. As a library, nothing."""
    if gc.isenabled() and _is_command_process():  # not among imports within an import, which pauses the collector
        _freeze_once()


@cache
def _freeze_once() -> None:
    gc.freeze()  # only the first time: what a model's work leaves later has to be collected


@contextmanager
def silence_coremltools() -> Iterator[None]:
    """Only errors of coremltools are shown meanwhile."""
    logger = logging.getLogger("coremltools")
    logger.addFilter(_is_error_record)
    try:
        yield
    finally:
        logger.removeFilter(_is_error_record)


def is_importing(frame: FrameType | None) -> bool:
    """Whether something is being imported in `frame`; what is raised there may be swallowed."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _is_command_process() -> bool:
    if WORKER_VARIABLE in os.environ:
        return True
    command = Path(sys.argv[0]).stem if sys.argv else ""
    return command == _COMMAND or (command in _RUN_AS_MODULE and "mil_ane_passes" in sys.orig_argv)


def _is_error_record(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
