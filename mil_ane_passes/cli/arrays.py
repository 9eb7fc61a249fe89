"""Reading and writing of named arrays in .npz files, for commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.npz import read_arrays, write_npz
from .output import write_atomically

__all__ = ["read_arrays", "write_arrays"]

Array = np.ndarray[Any, Any]


def write_arrays(target: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz atomically; an existing file is replaced."""
    write_atomically(target, lambda file: write_npz(file, arrays))
