"""Temporary storage of many arrays: in memory up to a limit, then in temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["MAX_BYTES_IN_MEMORY", "ValueStore"]

Array = np.ndarray[Any, Any]

MAX_BYTES_IN_MEMORY = 1 << 28
"Most bytes of values that are kept in memory (256 MB, which any machine has); the others go to files."


class ValueStore:
    """Arrays by key; a context manager that removes its files at the end. Stored arrays must not be modified."""

    def __init__(self, limit: int = MAX_BYTES_IN_MEMORY) -> None:
        self._left = limit
        self._held: dict[Hashable, Array] = {}
        self._files: dict[Hashable, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> ValueStore:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, key: Hashable, array: Array) -> None:
        if array.nbytes <= self._left:
            self._left -= array.nbytes
            self._held[key] = array
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mil_ane_passes_")
        path = Path(self._folder.name, f"{len(self._files)}.npy")
        np.save(path, array, allow_pickle=False)
        self._files[key] = path

    def get(self, key: Hashable) -> Array | None:
        """Return the array stored under `key`, or None."""
        if key in self._files:
            return np.asarray(np.load(self._files[key], allow_pickle=False))
        return self._held.get(key)
