"""Arrays by name in .npz files, for the commands that read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from ..core.npz import read_arrays, write_npz
from .output import write_whole

__all__ = ["check_target", "read_arrays", "write_arrays"]

Array = np.ndarray[Any, Any]


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
