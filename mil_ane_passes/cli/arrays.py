"""Arrays by name in .npz files, for the commands that read and write them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from ..core.npz import write_npz
from .output import write_whole

__all__ = ["check_target", "read_arrays", "write_arrays"]

Array = np.ndarray[Any, Any]


def read_arrays(path: str | None, what: str = "feeds", each: str = "input") -> dict[str, Array] | None:
    """The arrays of an .npz file by name. Raises InputError when it is missing or no .npz of plain arrays."""
    if path is None:
        return None
    expected = f"expected an .npz with one array for each {each}"
    if not Path(path).is_file():
        raise InputError(f"{what}: no file '{path}'; {expected}")
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise InputError(f"{what}: '{path}' holds one array; {expected}")
        with archive:
            return {name: archive[name] for name in archive.files}
    except InputError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{what}: cannot read '{path}' ({error}); {expected}") from error


def check_target(path: str) -> Path:
    """The file to write; raises InputError when its folder does not exist or it is a folder itself."""
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise InputError(f"no folder '{target.parent}' to write '{target.name}' to; create it first")
    if target.is_dir():
        raise InputError(f"'{target}' is a folder; expected the name of an .npz file to write")
    return target


def write_arrays(target: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz whole or not at all; a file that exists is replaced."""
    write_whole(target, lambda file: write_npz(file, arrays))
