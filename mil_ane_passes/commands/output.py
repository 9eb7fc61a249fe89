"""Shared output functions of commands: reports, progress, arrays, and copies that are made ahead."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..package.copy_ahead import CopyAhead
from ..package.destination import check_destination
from ..package.manifest import check_model_path
from ..package.output_file import write_atomically
from ..utils.errors import AnePassesError, InputError, format_memory_error
from ..utils.option_spelling import format_option
from ..utils.text_format import escape_text

if TYPE_CHECKING:
    from ..utils.npz import Array

__all__ = [
    "format_error",
    "format_example",
    "print_report",
    "print_upgrades",
    "show_progress",
    "start_copying",
    "write_arrays",
]

_LOG_INTERVAL = 10.0
"Seconds between two lines of progress if stderr is not a terminal."


def format_example(words: str) -> str:
    """Format the example at the end of a command's help."""
    return f"example: mil-ane-passes {words}"


def print_report(report: Any, form: str) -> None:
    """Print a report: its text, or exactly its `to_dict()` as JSON."""
    print_upgrades(report)
    print(json.dumps(report.to_dict(), indent=2, allow_nan=False) if form == "json" else str(report))


def print_upgrades(report: Any) -> None:
    """Print a line on stderr for each NeuralNetwork that the report is about, which was read as an ML Program."""
    for each in dict.fromkeys(getattr(report, "upgraded", ())):
        print(f"mil-ane-passes: {escape_text(each)}", file=sys.stderr)


def format_error(error: Exception) -> str:
    """Format the message for an error that ends the run."""
    if isinstance(error, AnePassesError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"{format_memory_error(error)}; nothing was written"
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    if isinstance(error, RecursionError):
        return "the model's blocks are nested too deeply for Python on this machine"
    # Last resort: an internal error must neither look like a user error nor print a traceback.
    logging.getLogger("mil_ane_passes").debug("internal error", exc_info=True)
    return (f"internal error ({type(error).__name__}: {error}); nothing was written; please report it with the "
            f"package or the code that causes it")


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: on a terminal in a line that is overwritten and finally cleared, elsewhere in a line
    every ten seconds."""
    if not sys.stderr.isatty():
        with _log_progress() as note:
            yield note
        return

    def show_line(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{escape_text(text)[:100]}")
        sys.stderr.flush()

    try:
        yield show_line
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


@contextmanager
def _log_progress() -> Iterator[Callable[[str], None]]:
    """Log progress on stderr: every ten seconds a line with the elapsed time and the last message, if any.

    Therefore an error at the start (a wrong path) is a single line even if imports take long.
    """
    started, last, over = time.monotonic(), [""], threading.Event()

    def note_progress(text: str) -> None:
        last[0] = text

    def write_lines() -> None:
        while not over.wait(_LOG_INTERVAL):
            if not last[0]:
                continue
            with suppress(OSError, ValueError):  # nobody reads, or stderr is closed
                passed = time.monotonic() - started
                print(f"mil-ane-passes: {passed:.0f} s: {escape_text(last[0])}", file=sys.stderr, flush=True)

    writer = threading.Thread(target=write_lines, name="mil-ane-passes progress", daemon=True)
    writer.start()
    try:
        yield note_progress
    finally:
        over.set()
        writer.join()


def write_arrays(target: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz atomically; an existing file is replaced."""
    from ..utils.npz import write_npz

    write_atomically(target, lambda file: write_npz(file, arrays))


def start_copying(
    source: str, output: str | None, overwrite: bool, dry_run: bool, packed: bool = False, parts: Sequence[str] = ("",),
) -> AbstractContextManager[CopyAhead | None]:
    """Start copying the large files of a package while coremltools is imported; none if weights are `packed` again.

    `parts` are the suffixes of the packages to write for `output`. Raises InputError if `output` is missing or could
    not be written.
    """
    if output is None and not dry_run:
        raise InputError(f"no output given; expected -o OUT.mlpackage, or {format_option('dry_run')}")
    if not source.strip():
        raise InputError("no path given; expected the path of an .mlpackage")
    check_model_path(source)  # before numpy is imported below
    if output is None or dry_run:
        return nullcontext()
    from ..transforms.contract import build_part_path

    for part in parts:
        check_destination(source, build_part_path(Path(output), part), overwrite)
    return nullcontext() if packed else CopyAhead(Path(source), Path(output))
