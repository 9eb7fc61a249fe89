"""What commands share: printing a report, showing progress."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..core.errors import InputError
from ..package.refusals import refusals
from ..package.replacing import replace_file

__all__ = ["add_format", "at_least_one", "check_file", "example", "progress_line", "show", "write_file", "write_whole"]


def example(words: str) -> str:
    """What the help of a command ends with."""
    return f"example: mil-ane-passes {words}"


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


def check_file(path: str, outside: str, what: str = "a file") -> Path:
    """The file to write; raises InputError for a folder, in a folder that is not there, or inside the package."""
    target = Path(path)
    if not path.strip() or target.is_dir():
        raise InputError(f"'{path}' is a folder; expected the name of {what} to write")
    if not target.absolute().parent.is_dir():
        raise InputError(f"no folder '{target.parent}' to write '{target.name}' to; create it first")
    if Path(os.path.realpath(outside)) in Path(os.path.realpath(target)).parents:
        raise InputError(f"'{path}' lies in the package {outside}, which is never changed; expected another place")
    return target


def write_file(target: Path, text: str) -> None:
    """Write a text as `write_whole` does."""
    write_whole(target, lambda file: file.write(text.encode("utf-8", "surrogateescape")))


def write_whole(target: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let `fill` write a file whole or not at all; a file that exists is replaced, of a link the one it leads to.

    What is no plain file, such as /dev/null or a pipe, is written to and stays what it is.
    """
    if target.exists() and not target.is_file():
        with refusals(target, "the file"), open(target, "wb") as device:
            fill(device)
        return
    replace_file(Path(os.path.realpath(target)), fill)
