"""Errors: each message names the source, what was found, what was expected, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

__all__ = [
    "AnePassesError",
    "InputError",
    "LimitReached",
    "MemoryLimitReached",
    "NotSupported",
    "RuleError",
    "format_memory_error",
    "suggest_nearest",
]

_MIN_SIMILARITY = 0.65
"""The least similarity (difflib's ratio) of a suggested name: a name of three characters with one wrong has 0.67. Names
that only share a word, such as `cast` and `int_casts`, have less; at 0.5 unrelated names are suggested."""

_DIGITS = re.compile(r"\d")


class AnePassesError(Exception):
    """Base of every error this package raises on purpose; the command line prints it without a traceback."""


class InputError(AnePassesError, ValueError):
    """The user's input cannot be used: a path, an option, a feed, a package (exit code 2).

    `option` is the keyword argument with the wrong value if settings files can set it, otherwise None.
    """

    def __init__(self, *texts: object, option: str | None = None) -> None:
        super().__init__(*texts)
        self.option = option


class NotSupported(AnePassesError, NotImplementedError):
    """The reference runtime lacks a feature that the program needs; raised before anything runs."""


class LimitReached(NotSupported):
    """A run was stopped, or not started, because it exceeds a limit on steps, time or memory.

    The message names the op and the limit.
    """


class MemoryLimitReached(LimitReached):
    """A run was stopped, or not started, because its values exceed the limit on memory."""


class RuleError(AnePassesError):
    """A rule raised, or broke its contract (wrong shape, endless rewriting); names the rule's file and line.

    `failure` has rule, op and reason as data where the rule failed on a program.
    """

    failure: Any = None


def format_memory_error(error: MemoryError) -> str:
    """Format the message for a MemoryError."""
    said = " ".join(str(error).split())
    return (f"not enough memory{f' ({said})' if said else ''}; use fewer jobs, a smaller model or smaller inputs, or "
            f"more memory (limits such as ulimit -v count)")


def suggest_nearest(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Return `"; did you mean 'x'?"` for the closest of `known`, or the empty string when nothing is close.

    Case does not count. Of several that are equally close and differ from `name` in digits only, such as versions, the
    one with the digits of `name` in another order is meant, or none.
    """
    names = {each.casefold(): each for each in known}
    wanted = str(name).casefold()
    close = difflib.get_close_matches(wanted, list(names), n=2, cutoff=_MIN_SIMILARITY)
    if len(close) == 2 and len({_DIGITS.sub("", each) for each in (wanted, *close)}) == 1:
        first, second = (difflib.SequenceMatcher(None, each, wanted).ratio() for each in close)
        if first == second:
            close = [each for each in close if sorted(each) == sorted(wanted)]
    return f"; did you mean '{shown(names[close[0]])}'?" if close else ""
