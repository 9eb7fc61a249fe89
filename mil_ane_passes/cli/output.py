"""What commands share: printing a report, showing progress, reading feeds."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError

__all__ = ["add_format", "at_least_one", "progress_line", "read_feeds", "show"]


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


def read_feeds(path: str | None) -> dict[str, np.ndarray[Any, Any]] | None:
    """The arrays of an .npz file by name. Raises InputError when it is missing or no .npz of plain arrays."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise InputError(f"feeds: no file '{path}'; expected an .npz with one array for each input")
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise InputError(f"feeds: '{path}' holds one array; expected an .npz with one array for each input")
        with archive:
            return {name: archive[name] for name in archive.files}
    except InputError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"feeds: cannot read '{path}' ({error}); expected an .npz with one array for each input"
                         ) from error
