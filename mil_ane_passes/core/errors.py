"""What can go wrong, and how it is said: who, what was found, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

__all__ = ["AnePassesError", "InputError", "NotSupported", "RuleError", "nearest"]


class AnePassesError(Exception):
    """Base of every error this package raises on purpose; the command line prints it without a traceback."""


class InputError(AnePassesError, ValueError):
    """What the user gave cannot be used: a path, an option, a feed, a package (exit code 2)."""


class NotSupported(AnePassesError, NotImplementedError):
    """The reference runtime lacks something the program needs; says so before anything runs."""


class RuleError(AnePassesError):
    """A rule broke its contract (wrong shape, endless rewriting); names the rule's file and line."""


def nearest(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """`"; did you mean 'x'?"` for the closest of `known`, or the empty string when nothing is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean '{shown(close[0])}'?" if close else ""
