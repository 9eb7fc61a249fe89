"""What commands share: printing a report, showing progress."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["add_format", "at_least_one", "progress_line", "show"]


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text for people (default), or json")


def at_least_one(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def show(report: Any, form: str) -> None:
    """Print a report: its text, or exactly its `to_dict()` as JSON."""
    print(json.dumps(report.to_dict(), indent=2, allow_nan=False) if form == "json" else str(report))


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr that is overwritten and at last wiped; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def say(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text[:100]}")
        sys.stderr.flush()

    try:
        yield say
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
