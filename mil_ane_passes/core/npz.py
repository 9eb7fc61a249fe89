"""Arrays by name in an .npz file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import InputError

__all__ = ["read_arrays", "write_npz"]

Array = np.ndarray[Any, Any]


def read_arrays(path: str | None, what: str = "feeds", each: str = "input") -> dict[str, Array] | None:
    """The arrays of an .npz file by name. Raises InputError when it is missing or no .npz of plain arrays."""
    if path is None:
        return None
    expected = f"expected an .npz with one array for each {each}"
    if not Path(path).is_file():
        raise InputError(f"{what}: no file '{path}'; {expected}")
    with open(path, "rb") as file:
        start = file.read(6)
    if not start.startswith((b"PK", b"\x93NUMPY")):  # numpy would speak of pickled objects
        raise InputError(f"{what}: '{path}' is no .npz file; {expected}, as np.savez(path, name=array) writes it")
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


def write_npz(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    """What `np.savez` writes, for any names: an output may be called `file`, which is a parameter there."""
    write: Any = np.lib.format.write_array  # numpy 1.26 gives it no types
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                write(member, np.asarray(array), allow_pickle=False)
