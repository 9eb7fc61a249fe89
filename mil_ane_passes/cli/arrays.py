"""Arrays by name in .npz files, for the commands that read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.npz import read_arrays, write_npz
from .output import write_atomically

__all__ = ["read_arrays", "write_arrays"]

Array = np.ndarray[Any, Any]


def write_arrays(target: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz whole or not at all; a file that exists is replaced."""
    write_atomically(target, lambda file: write_npz(file, arrays))
