"""Atomic replacement of a file: complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .files import sync_path
from .staging import Staging
from .write_errors import convert_write_errors

__all__ = ["replace_file"]


def replace_file(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Replace the file or link at `path` by a new file that `fill` writes. Raises InputError when that fails."""
    with convert_write_errors(path, "the file"), Staging(path) as staging:
        staged = staging.folder / "new"
        with open(staged, "xb") as file:
            fill(file)
        sync_path(staged)
        os.replace(staged, path)
