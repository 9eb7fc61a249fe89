"""Meets coremltools: imports it and registers our passes.

As a command we own the terminal: what coremltools logs while it is imported (the Mac-only libraries it misses
elsewhere, a torch newer than it was tested with) would stand above every message of ours. As a library we keep quiet
about nothing.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

__all__ = ["register_quietly"]

_COMMAND = "mil-ane-passes"
_RUN_AS_MODULE = frozenset({"-m", "__main__"})


def register_quietly() -> None:
    """Register every rewrite with coremltools as `ane::<name>`."""
    command = Path(sys.argv[0]).stem if sys.argv else ""
    logger = logging.getLogger("coremltools")
    ours = command == _COMMAND or (command in _RUN_AS_MODULE and "mil_ane_passes" in sys.orig_argv)
    if ours:
        logger.addFilter(_only_errors)
    try:
        from .pipeline import register_passes

        register_passes()
    finally:
        logger.removeFilter(_only_errors)


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
