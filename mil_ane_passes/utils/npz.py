"""Reading and writing of named arrays in .npz files."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import InputError
from .option_spelling import choose_spelling

__all__ = ["Array", "StoredArray", "read_arrays", "write_npz"]

Array = np.ndarray[Any, Any]

_MAX_EAGER_BYTES = 1 << 26
"Bytes of arrays that are read eagerly; arrays beyond that are read after their shapes have been checked."
_MAX_NAME_BYTES = (1 << 16) - 1 - len(".npy")
"""Maximum length in bytes of an array's name: that of a member's name in a zip archive, less ".npy"."""
_READ_ERRORS = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error,
                RuntimeError, NotImplementedError, MemoryError, OverflowError, TypeError, SyntaxError,
                tokenize.TokenError)
"""Exceptions that zipfile, its decompressors and numpy raise for damaged, encrypted and huge members, the last three
for headers of arrays."""


class StoredArray:
    """An array of an .npz file whose header has been read; `np.asarray` reads the rest.

    A few MB may contain an array of many GB, so callers that expect a shape check it first.
    """

    def __init__(self, path: str, member: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._path, self._member = path, member
        self.shape, self.dtype = shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        with _convert_read_errors(
            self._path, f"'{_get_array_name(self._member)}', {self.dtype} {self.shape}, {self.nbytes} bytes"
        ):
            with zipfile.ZipFile(self._path) as archive, archive.open(self._member) as file:
                array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array if dtype is None else array.astype(dtype)


def read_arrays(path: str | None, what: str = "feeds", each: str = "input") -> dict[str, Any] | None:
    """Read the arrays of an .npz file by name, large ones as `StoredArray`.

    Raises InputError when the file is missing or is not an .npz of plain arrays.
    """
    if path is None:
        return None
    expected = f"expected an .npz file with one array per {each}"
    if not Path(path).is_file():
        raise InputError(f"{what}: no file '{path}'; {expected}")
    with open(path, "rb") as file:
        start = file.read(6)
    if start == b"\x93NUMPY":
        raise InputError(f"{what}: '{path}' is a single array; {expected}")
    if not start.startswith(b"PK"):  # numpy's own message would be about pickled objects
        raise InputError(f"{what}: '{path}' is not an .npz file; {expected}, as written by np.savez(path, name=array)")
    with _convert_read_errors(path, expected=expected, what=what), zipfile.ZipFile(path) as archive:
        stored: dict[str, StoredArray] = {}
        for member in archive.infolist():
            name = _get_array_name(member)
            if name in stored:
                raise InputError(f"{what}: '{path}' has two arrays called '{name}'; {expected}")
            stored[name] = _read_header(archive, path, member)
    found: dict[str, Any] = {}
    left = _MAX_EAGER_BYTES
    for name, array in stored.items():
        left -= array.nbytes
        with _convert_read_errors(path, expected=expected, what=what):
            found[name] = np.asarray(array) if left >= 0 else array
    return found


@contextmanager
def _convert_read_errors(
    path: str, which: str = "", expected: str = "expected a complete file", what: str = "feeds"
) -> Iterator[None]:
    """Convert errors of zipfile and numpy to InputError, with what was read and what was expected."""
    try:
        yield
    except InputError:
        raise
    except _READ_ERRORS as error:
        why = "not enough memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        of = f" of {which}" if which else ""
        raise InputError(f"{what}: cannot read '{path}'{of} ({why}); {expected}") from error


def _get_array_name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


def _read_header(archive: zipfile.ZipFile, path: str, member: zipfile.ZipInfo) -> StoredArray:
    """Read the shape and dtype of a member from its header. Raises ValueError if they do not match its size."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        if version not in ((1, 0), (2, 0)):
            raise ValueError(
                f"'{_get_array_name(member)}' has version {version} of the .npy format; expected 1.0 or 2.0"
            )
        shape, _, dtype = read(file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError(f"'{_get_array_name(member)}' contains Python objects, which are not supported")
    array = StoredArray(path, member, tuple(shape), dtype)
    if min(shape, default=0) < 0 or array.nbytes != member.file_size - start:
        raise ValueError(
            f"'{_get_array_name(member)}' declares {dtype} {tuple(shape)}, which is {array.nbytes} bytes, but has "
            f"{member.file_size - start}"
        )
    return array


def write_npz(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    """Write the same as `np.savez`, for any names: an output may be called `file`, which is a parameter of `np.savez`.

    Raises InputError for names that a zip archive cannot store unchanged.
    """
    for name in arrays:
        size = len(name.encode("utf-8", "surrogatepass"))
        if "\0" in name or size > _MAX_NAME_BYTES:
            why = f"it has {size} bytes" if size > _MAX_NAME_BYTES else "it has a NUL character"
            raise InputError(f"'{name[:60]}': cannot be the name of an array in an .npz file, because {why}; rename "
                             f"it first "
                             f"({choose_spelling('mil-ane-passes edit --rename', 'edit(..., rename=...)')})")
    write: Any = np.lib.format.write_array  # numpy 1.26 gives it no types
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                write(member, np.asarray(array), allow_pickle=False)
