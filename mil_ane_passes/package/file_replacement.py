"""Atomic replacement of a file: complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ..utils.errors import InputError
from .files import sync_path
from .staging import Staging
from .swap import move_to_free_path
from .write_errors import convert_write_errors

__all__ = ["replace_file"]


def replace_file(path: Path, fill: Callable[[IO[bytes]], object], overwrite: bool = True) -> None:
    """Replace the file or link at `path` by a new file that `fill` writes.

    Raises InputError if that fails, and without `overwrite` if another run has put something at `path` meanwhile.
    """
    with convert_write_errors(path, "the file"), Staging(path) as staging:
        staged = staging.folder / "new"
        with open(staged, "xb") as file:
            fill(file)
        sync_path(staged)
        if overwrite:
            os.replace(staged, path)
            return
        try:
            move_to_free_path(staged, path)
        except FileExistsError as error:
            raise InputError(f"{path}: another run has written a file to this path in the meantime, which is kept; "
                             "this run wrote nothing; expected a free path, or overwrite to replace the "
                             "file") from error
