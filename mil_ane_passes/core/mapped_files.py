"""Files that are mapped into memory, read without the risk that goes with it.

Where a mapped file is cut short, reading behind its new end kills the process (SIGBUS). So what a run uses as a whole
is read from the file, once for all runs that use it, and a cut is an error at any time. The mapping itself is read,
after a check that the file has the size it had, only where a part of a weight is used (an op that picks rows of a
table) and where rules look at values. What remains is a cut between that check and the end of the read: the
milliseconds of one op, and the seconds that one rule takes on a large program.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from .errors import AnePassesError

__all__ = [
    "MappedFile",
    "check_file_of",
    "check_files_of",
    "check_mapped_files",
    "file_of",
    "is_mapped",
    "iterate_chunks",
    "map_file",
    "read_exactly",
    "read_once",
]

Array = np.ndarray[Any, Any]

_CHUNK_BYTES = 4 << 20
"Bytes read at once: they stay in the processor's cache until they are converted."
_ALIGNMENT = 64
"What `read_once` makes begins on this boundary, as what torch allocates does."


@dataclass(frozen=True, eq=False)
class MappedFile:
    """A mapped file: where it begins in memory, its size then, and the open file."""

    start: int
    size: int
    file: FileIO
    path: Path
    copies: weakref.WeakValueDictionary[tuple[int, int], Array] = field(default_factory=weakref.WeakValueDictionary)
    "What `read_once` has read, by offset and bytes, as long as anybody uses it."

    def check(self) -> None:
        """Raises AnePassesError when the file is smaller than it was."""
        found = os.fstat(self.file.fileno()).st_size
        if found < self.size:
            raise _make_truncated_file_error(self.path, found, self.size)


_mapped_files: dict[int, MappedFile] = {}
"The files that are mapped now, by where they begin; one is dropped with the last array that looks into it."


def map_file(file: FileIO, path: Path) -> Array:
    """The bytes of an open file as an array that looks into it, read only."""
    mapped = np.memmap(file, dtype=np.uint8, mode="r")
    owner: mmap.mmap = vars(mapped)["_mmap"]
    array = np.asarray(mapped)
    start = _get_address(array)
    _mapped_files[start] = MappedFile(start, array.nbytes, file, path)
    weakref.finalize(owner, _mapped_files.pop, start, None).atexit = False
    return array


def read_exactly(file: FileIO, path: Path, at: int, count: int) -> bytes:
    """`count` bytes at `at`. Raises AnePassesError where the file ends before."""
    found = os.pread(file.fileno(), count, at)
    while len(found) < count:  # a read may end early, and the kernel reads no more than 2 GB at once
        more = os.pread(file.fileno(), count - len(found), at + len(found))
        if not more:
            raise _make_truncated_file_error(path, os.fstat(file.fileno()).st_size, at + count)
        found += more
    return found


def check_mapped_files(files: Iterable[MappedFile] | None = None) -> None:
    """Raises AnePassesError when one of `files`, by default of all that are mapped, is smaller than it was."""
    for mapping in list(_mapped_files.values()) if files is None else files:
        mapping.check()


def check_files_of(arrays: Iterable[Array]) -> None:
    """Raises AnePassesError when a file that one of `arrays` looks into is smaller than it was.

    `arrays` are gone through only where any mapped file is: many of them cost more than the few files.
    """
    try:
        check_mapped_files()
    except AnePassesError:
        check_mapped_files(mapping for array in arrays if (mapping := file_of(array)) is not None)


def is_mapped(array: Array) -> bool:
    """Whether `array` looks into a mapped file."""
    return file_of(array) is not None


def file_of(array: Array) -> MappedFile | None:
    """The mapped file that `array` looks into, or None."""
    at = _get_address(array)
    return (
        next((each for each in _mapped_files.values() if 0 <= at - each.start < each.size), None)
        if _mapped_files
        else None
    )


def check_file_of(array: Array) -> None:
    """Raises AnePassesError when `array` looks into a mapped file that is smaller than it was."""
    mapping = file_of(array)
    if mapping is not None:
        mapping.check()


def iterate_chunks(array: Array) -> Iterator[tuple[int, Array]]:
    """The elements of `array`, which is contiguous and looks into a mapped file, as they are in the file now.

    Gives the index of the first element of each piece, and the piece, whose memory the next one takes.
    """
    mapping = file_of(array)
    assert mapping is not None
    offset, step = _get_address(array) - mapping.start, max(1, _CHUNK_BYTES // array.itemsize)
    buffer = np.empty(min(step, array.size), array.dtype)
    for index in range(0, array.size, step):
        piece = buffer[: array.size - index]
        _read_into(piece.view(np.uint8), mapping, offset + index * array.itemsize)
        yield index, piece


def read_once(array: Array) -> Array:
    """`array`, which is contiguous and looks into a mapped file, in memory of its own.

    Whoever reads the same elements gets the same memory, as with the mapping: programs of one package share weights.
    """
    mapping = file_of(array)
    assert mapping is not None
    offset = _get_address(array) - mapping.start
    key = offset, array.nbytes
    memory = mapping.copies.get(key)
    if memory is None:
        memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)  # numpy asks for huge pages, and so reads twice as fast
        _read_into(_aligned(memory, array.nbytes), mapping, offset)
        mapping.copies[key] = memory
    return _aligned(memory, array.nbytes).view(array.dtype).reshape(array.shape)


def _aligned(memory: Array, nbytes: int) -> Array:
    first = -_get_address(memory) % _ALIGNMENT
    return memory[first : first + nbytes]


def _read_into(target: Array, mapping: MappedFile, at: int) -> None:
    done = 0
    while done < target.size:
        count = os.preadv(mapping.file.fileno(), [target[done:].data], at + done)
        if not count:
            raise _make_truncated_file_error(mapping.path, os.fstat(mapping.file.fileno()).st_size, at + target.size)
        done += count


def _get_address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _make_truncated_file_error(path: Path, found: int, expected: int) -> AnePassesError:
    # No InputError: a check of two programs takes that for feeds that one of them does not accept.
    return AnePassesError(f"{path}: the file was cut to {found} bytes while it was in use, at least "
                          f"{expected} expected; load the package again when it is complete")
