"""Output files of commands other than packages: checked before the work, and written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from ..utils.errors import InputError
from .destination import find_enclosing_package
from .executorch_program import find_read_file
from .file_replacement import replace_file
from .write_errors import convert_write_errors

__all__ = ["check_output_file", "write_atomically", "write_text_file"]


def check_output_file(path: str, inputs: Iterable[str | os.PathLike[str] | None], what: str = "a file") -> Path:
    """Check the path of a file to write.

    Raises InputError if it is a folder, in a missing folder, inside a package, or one of the `inputs` of the same run,
    which the result would replace. An input that is None is ignored.
    """
    target = Path(path)
    if not path.strip() or target.is_dir():
        raise InputError(f"'{path}' is a folder; expected the name of {what} to write")
    if not target.absolute().parent.is_dir():
        raise InputError(f"no folder '{target.parent}' to write '{target.name}' to; create it first")
    if (around := find_enclosing_package(target)) is not None:
        raise InputError(f"'{path}' is in the package {around}, which is never modified; expected another path")
    for each in inputs:
        read = None if each is None else find_read_file(each)
        if read is not None and target.is_file() and os.path.exists(read) and os.path.samefile(target, read):
            raise InputError(f"'{path}' is read by this run ('{os.fspath(read)}') and would be replaced; expected "
                             "another file")
    return target


def write_text_file(target: Path, text: str) -> None:
    """Write `text` to `target` with `write_atomically`."""
    write_atomically(target, lambda file: file.write(text.encode("utf-8", "surrogateescape")))


def write_atomically(target: Path, fill: Callable[[IO[bytes]], object], overwrite: bool = True) -> None:
    """Let `fill` write a file atomically. An existing file is replaced; a link is followed to its target.

    Without `overwrite`, raises InputError for an existing file.

    A path that is not a regular file, such as /dev/null or a pipe, is written to and not replaced.
    """
    if target.exists() and not target.is_file():
        with convert_write_errors(target, "the file"), open(target, "wb") as device:
            fill(device)
        return
    replace_file(Path(os.path.realpath(target)), fill, overwrite)
