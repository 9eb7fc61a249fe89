"""Reading of memory-mapped files without the risk of a crash, and without results of what changed meanwhile.

If a mapped file is truncated, reading beyond its new end ends the process by the signal SIGBUS. Therefore a value that
a run uses entirely is read from the file, once for all runs that use it. The mapping itself is read only where a part
of a weight is used (an op that picks rows of a table) and where rules look at values. There the signal is handled:
pages that are gone are replaced by zeros, so that the read goes on. A check before each use, and one more before there
is a result, raise for a file that is not as it was when it was mapped: they compare its size and the time of its last
change.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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
    "iterate_rows",
    "map_file",
    "read_exactly",
    "read_once",
    "release_pages",
]

Array = np.ndarray[Any, Any]

_CHUNK_BYTES = 4 << 20
"Bytes per read: few enough to stay in the processor's cache until they are converted."
_LARGE_BYTES = 1 << 20
"Copies of at least this many bytes are allocated outside the heap."
_MAP_FIXED = 0x10
"The flag of mmap that replaces what is mapped at an address, on Linux and macOS."
_ALIGNMENT = 64
"Alignment of the arrays of `read_once`, the same as that of torch's allocations."


@dataclass(eq=False)
class MappedFile:
    """A mapped file: its start address in memory, the open file, and its size and last change when it was mapped.

    The time of the last change is in ns. From `end` on, an offset at the end of a page, memory is not that of the file:
    beyond its size, or pages of zeros that replace what was cut off.
    """

    start: int
    size: int
    changed: int
    file: FileIO
    path: Path
    end: int
    memory: weakref.ref[mmap.mmap]
    copies: weakref.WeakValueDictionary[tuple[int, int], Array] = field(default_factory=weakref.WeakValueDictionary)
    "Arrays read by `read_once`, by offset and bytes, as long as they are in use."

    def check(self) -> None:
        """Raise AnePassesError if the file is not as it was when it was mapped."""
        found = os.fstat(self.file.fileno())
        if found.st_size < self.size or self.end < _align_to_page(self.size):
            raise _make_truncated_file_error(self.path, min(found.st_size, self.end), self.size)
        if (found.st_size, found.st_mtime_ns) != (self.size, self.changed):
            raise AnePassesError(f"{self.path}: the file was modified while it was in use; load the package again "
                                 f"when it is complete")

    def replace_lost_pages(self, replace: Callable[[int, int], None]) -> bool:
        """Call `replace` with the start and size of pages that the file has lost; False if it has lost none."""
        end = _align_to_page(os.fstat(self.file.fileno()).st_size)
        if end >= self.end:
            return False
        replace(self.start + end, self.end - end)
        self.end = end
        return True


_mapped_files: dict[int, MappedFile] = {}
"The currently mapped files by start address; an entry is dropped with the last array that views it."
_handlers: list[Any] = []
"The handler of SIGBUS, as C calls it, kept from being freed."


def map_file(file: FileIO, path: Path) -> Array:
    """Map an open file and return its bytes as a read-only array."""
    _handle_lost_pages()
    changed = os.fstat(file.fileno()).st_mtime_ns
    mapped = np.memmap(file, dtype=np.uint8, mode="r")
    owner: mmap.mmap = vars(mapped)["_mmap"]
    array = np.asarray(mapped)
    start = _get_address(array)
    _mapped_files[start] = MappedFile(start, array.nbytes, changed, file, path, _align_to_page(array.nbytes),
                                      weakref.ref(owner))
    weakref.finalize(owner, _mapped_files.pop, start, None).atexit = False
    return array


@functools.cache
def _handle_lost_pages() -> None:
    """Replace the pages that a mapped file has lost by zeros when they are read; other causes of SIGBUS stay as is.

    The system calls the handler in the thread that reads, which is in a loop over an array: code in Python may run
    there as in any callback. What is read there is of no use, and whoever uses it raises by `MappedFile.check`.

    Several threads may read a lost page before the first of them has replaced it. So the first signal of a thread after
    pages were replaced is taken for such a read, and the read is repeated; another cause signals again.
    """
    if not hasattr(signal, "SIGBUS"):  # on Windows mapped files cannot be truncated
        return
    library = ctypes.CDLL(None)
    library.signal.restype, library.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_int64)

    def replace_pages(start: int, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if library.mmap(start, size, mmap.PROT_READ, flags, -1, 0) != start:
            raise OSError

    replacements, repeated_at, lock = 0, dict[int, int](), threading.Lock()

    def handle_signal(number: int) -> None:
        nonlocal replacements
        thread = threading.get_ident()
        with lock:
            try:
                replacements += any([mapping.replace_lost_pages(replace_pages) for mapping in _list_mapped_files()])
            except BaseException:  # no exception may leave a signal handler
                repeated_at[thread] = replacements
            repeat = repeated_at.get(thread, 0) < replacements
            repeated_at[thread] = replacements
        if not repeat:
            library.signal(number, before)
            signal.raise_signal(number)

    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handle_signal))
    before = library.signal(signal.SIGBUS, ctypes.cast(_handlers[0], ctypes.c_void_p))


def read_exactly(file: FileIO, path: Path, at: int, count: int) -> bytes:
    """Read `count` bytes at offset `at`. Raises AnePassesError if the file ends before that."""
    found = os.pread(file.fileno(), count, at)
    while len(found) < count:  # a read may end early, and the kernel reads no more than 2 GB at once
        more = os.pread(file.fileno(), count - len(found), at + len(found))
        if not more:
            raise _make_truncated_file_error(path, os.fstat(file.fileno()).st_size, at + count)
        found += more
    return found


def check_mapped_files(files: Iterable[MappedFile] | None = None) -> None:
    """Raise AnePassesError if one of `files` (default: all mapped files) is not as it was when it was mapped."""
    for mapping in _list_mapped_files() if files is None else files:
        mapping.check()


def check_files_of(arrays: Iterable[Array]) -> None:
    """Raise AnePassesError when a file that one of `arrays` looks into is not as it was when it was mapped.

    `arrays` are gone through only where any mapped file is: many of them cost more than the few files.
    """
    try:
        check_mapped_files()
    except AnePassesError:
        check_mapped_files(mapping for array in arrays if (mapping := file_of(array)) is not None)


def is_mapped(array: Array) -> bool:
    """Return whether `array` is a view of a mapped file."""
    return file_of(array) is not None


def file_of(array: Array) -> MappedFile | None:
    """Return the mapped file that `array` is a view of, or None."""
    at = _get_address(array)
    return next((each for each in _list_mapped_files() if 0 <= at - each.start < each.size), None)


def _list_mapped_files() -> list[MappedFile]:
    """List the currently mapped files.

    Finalizers remove files whenever garbage is collected, as it may be while a list is made of a dict's values, but not
    while a dict is copied.
    """
    return list(_mapped_files.copy().values())


def check_file_of(array: Array) -> None:
    """Raise AnePassesError if `array` views a mapped file that is not as it was when it was mapped."""
    mapping = file_of(array)
    if mapping is not None:
        mapping.check()


def iterate_chunks(array: Array, count: int | None = None) -> Iterator[tuple[int, Array]]:
    """Yield the elements of `array`, a contiguous view of a mapped file, as they are in the file now.

    Each item is the index of the first element of a piece, and the piece, which has `count` elements, or as many as the
    cache holds. The next piece reuses its memory.
    """
    mapping = file_of(array)
    assert mapping is not None
    offset, step = _get_address(array) - mapping.start, count or max(1, _CHUNK_BYTES // array.itemsize)
    buffer = np.empty(min(step, array.size), array.dtype)
    for index in range(0, array.size, step):
        piece = buffer[: array.size - index]
        _read_into(piece.view(np.uint8), mapping, offset + index * array.itemsize)
        yield index, piece


def iterate_rows(array: Array) -> Iterator[Array]:
    """Yield the elements of `array`, which need not be contiguous, some rows at a time, as contiguous arrays.

    Pages of a mapped file that were read for them are given back: a part of a large weight then takes no memory.
    """
    count = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), count):
        rows = array[start : start + count]
        yield np.ascontiguousarray(rows)
        release_pages(rows)


def release_pages(array: Array) -> None:
    """Take the pages that a view of a mapped file has read out of the process's memory; they stay in the system's."""
    mapping = file_of(array)
    memory = None if mapping is None else mapping.memory()
    if mapping is None or memory is None or not hasattr(memory, "madvise") or min(array.strides, default=0) < 0:
        return
    begin = (_get_address(array) - mapping.start) // mmap.PAGESIZE * mmap.PAGESIZE
    extent = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides)) + array.itemsize
    end = min(_get_address(array) - mapping.start + extent, mapping.size)
    if begin < end:
        memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def read_once(array: Array) -> Array:
    """Return a copy in memory of `array`, a contiguous view of a mapped file.

    Reads of the same elements share the memory, as with the mapping: programs of one package share weights.
    """
    mapping = file_of(array)
    assert mapping is not None
    offset = _get_address(array) - mapping.start
    key = offset, array.nbytes
    memory = mapping.copies.get(key)
    if memory is None:
        memory = _allocate_memory(array.nbytes + _ALIGNMENT)
        _read_into(_align_memory(memory, array.nbytes), mapping, offset)
        mapping.copies[key] = memory
    return _align_memory(memory, array.nbytes).view(array.dtype).reshape(array.shape)


def _allocate_memory(nbytes: int) -> Array:
    """Return uninitialized bytes; many of them outside the heap, in huge pages where the system has them.

    In the heap, weights that stay leave holes between values that do not, and the process grows by more than it holds.
    Huge pages are read into twice as fast.
    """
    if nbytes < _LARGE_BYTES:
        return np.empty(nbytes, np.uint8)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    pages = mmap.mmap(-1, nbytes, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _align_memory(memory: Array, nbytes: int) -> Array:
    first = -_get_address(memory) % _ALIGNMENT
    return memory[first : first + nbytes]


def _read_into(target: Array, mapping: MappedFile, at: int) -> None:
    done = 0
    while done < target.size:
        count = os.preadv(mapping.file.fileno(), [target[done:].data], at + done)
        if not count:
            raise _make_truncated_file_error(mapping.path, os.fstat(mapping.file.fileno()).st_size, at + target.size)
        done += count


def _align_to_page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _get_address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _make_truncated_file_error(path: Path, found: int, expected: int) -> AnePassesError:
    # No InputError: a check of two programs takes that for feeds that one of them does not accept.
    return AnePassesError(f"{path}: the file was truncated to {found} bytes while it was in use; expected at least "
                          f"{expected}; load the package again when it is complete")
