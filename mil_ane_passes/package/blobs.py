"""Weight files (blob storage v2), mapped and never read as a whole.

A file is a 64-byte header (count, version 2) and blobs: 64 bytes of metadata (sentinel, dtype, size, data offset,
padding bits), then the data. Header, metadata and data all start at multiples of 64 bytes.
"""

from __future__ import annotations

import bisect
import math
import os
import stat
import struct
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

from ..ir.constants import BlobRef, LazyValue, unpack_elements
from ..utils.errors import InputError
from ..utils.mapped_files import check_files_of, map_file, read_exactly
from .files import get_file_stamp
from .manifest import Layout, check_inside

# Constants of the format of weight.bin, from MILBlob in coremltools: alignment of metadata and data in bytes, the
# number at the start of a blob's metadata, and the version of the file.
ALIGN = 64
SENTINEL = 0xDEADBEEF
VERSION = 2
HEADER = struct.Struct("<II")
METADATA = struct.Struct("<IIQQQ")
DATA_OFFSET_AT = 16  # position of the data offset in a blob's metadata
MODEL_PATH = "@model_path/"
_REMEDY = "the package is damaged or truncated: use a fresh copy"

DTYPES: dict[Any, int] = {
    types.fp16: 1,
    types.fp32: 2,
    types.uint8: 3,
    types.int8: 4,
    types.int16: 6,
    types.uint16: 7,
    types.int4: 8,
    types.uint1: 9,
    types.uint2: 10,
    types.uint4: 11,
    types.uint3: 12,
    types.uint6: 13,
    types.int32: 14,
    types.uint32: 15,
}
_DTYPE_NAMES = {code: types.builtin_to_string(dtype) for dtype, code in DTYPES.items()}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Blob:
    """One blob's metadata: its `offset` in the file, its dtype code, and the size and offset of its data in bytes."""

    offset: int
    dtype: int
    nbytes: int
    data: int


def align_up(size: int) -> int:
    """Round `size` up to the alignment of blobs (64 bytes)."""
    return -(-size // ALIGN) * ALIGN


def count_payload_bytes(dtype: Any, count: int) -> int:
    """Return the number of bytes that `count` elements of MIL type `dtype` take in a weight file."""
    bits = dtype.get_bitwidth() if types.is_sub_byte(dtype) else 8 * np.dtype(types.nptype_from_builtin(dtype)).itemsize
    return -(-count * int(bits) // 8)


def _format_open_error(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"weight file {path} cannot be read ({error.strerror}); check its permissions"
    return f"weight file {path} is missing ({error.strerror}); {_REMEDY}"


class WeightFile:
    """A weight file, mapped read-only. `name` is its name in the program (`@model_path/weights/weight.bin`)."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block until something writes to it
                raise InputError(f"weight file {path} is not a regular file; {_REMEDY}")
            self._file = FileIO(path)
            found = os.fstat(self._file.fileno())
            self.size = found.st_size
            self._opened = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            self.stamp = get_file_stamp(found)
        except OSError as error:
            raise InputError(_format_open_error(path, error)) from error
        if self.size < ALIGN:
            raise InputError(f"weight file {path} has {self.size} bytes; expected a header of {ALIGN}; {_REMEDY}")
        try:
            self.bytes: Array = map_file(self._file, path)
        except OSError as error:
            raise InputError(f"weight file {path} cannot be read ({error.strerror}); {_REMEDY}") from error
        _, version = HEADER.unpack_from(self.read_metadata(0))
        if version != VERSION:
            raise InputError(f"weight file {path} has storage version {version}; expected {VERSION}; {_REMEDY}")
        self._blobs: dict[int, Blob] = {}
        self._reserved_ranges: list[tuple[int, int, int]] = []  # in order: start, end, and the blob's offset

    def read_metadata(self, offset: int) -> bytes:
        """Return the 64 bytes at `offset`."""
        return self.read(offset, ALIGN)

    def read(self, at: int, count: int) -> bytes:
        """Read `count` bytes at `at` with a system call.

        Access through the mapping would map 64 KB of weights around them, which counts as memory of this process.
        """
        return read_exactly(self._file, self.path, at, count)

    def blob(self, offset: int) -> Blob:
        """Return the blob whose metadata is at `offset`.

        Raises InputError when there is no blob, or its data exceeds the file.
        """
        if offset not in self._blobs:
            self._blobs[offset] = self._read_blob(offset)
        return self._blobs[offset]

    @property
    def known_blobs(self) -> tuple[Blob, ...]:
        """The blobs looked up so far."""
        return tuple(self._blobs.values())

    def _read_blob(self, offset: int) -> Blob:
        if not 0 < offset <= self.size - ALIGN:
            raise InputError(
                f"file {self.path}, offset {offset}: past the end; expected at most {self.size - ALIGN} "
                f"in a file of {self.size} bytes; {_REMEDY}"
            )
        sentinel, dtype, nbytes, data, _ = METADATA.unpack_from(self.read_metadata(offset))
        if sentinel != SENTINEL:
            raise InputError(
                f"file {self.path}, offset {offset}: found sentinel {sentinel:#010x}; "
                f"expected {SENTINEL:#010x}; {_REMEDY}"
            )
        if offset % ALIGN or data % ALIGN:
            raise InputError(
                f"file {self.path}, offset {offset}: a blob with data at byte {data}; expected both at multiples "
                f"of {ALIGN}; {_REMEDY}"
            )
        if data < offset + ALIGN or data + nbytes > self.size:
            raise InputError(
                f"file {self.path}, offset {offset}: {nbytes} bytes at byte {data} expected, but the file has "
                f"{self.size}; {_REMEDY}"
            )
        self._reserve_range(offset, offset, offset + ALIGN)
        self._reserve_range(offset, data, data + nbytes)
        return Blob(offset, dtype, nbytes, data)

    def _reserve_range(self, blob: int, start: int, end: int) -> None:
        """Record that bytes `start` to `end` belong to the blob at `blob`.

        Raises InputError when they overlap another blob's.
        """
        at = bisect.bisect_left(self._reserved_ranges, (start,))
        for other_start, other_end, other in self._reserved_ranges[max(at - 1, 0) : at + 1]:
            if start < other_end and other_start < end:
                raise InputError(
                    f"file {self.path}, offset {blob}: bytes {start} to {end} overlap the blob at offset {other} "
                    f"({other_start} to {other_end}); expected disjoint blobs; {_REMEDY}"
                )
        if start < end:
            self._reserved_ranges.insert(at, (start, end, blob))

    def view_elements(self, blob: Blob, dtype: Any) -> Array:
        """Return the flat elements of `blob` as they are in the file; packed ones as bytes."""
        raw = self.bytes[blob.data : blob.data + blob.nbytes]
        return raw if types.is_sub_byte(dtype) else raw.view(types.nptype_from_builtin(dtype))

    def make_lazy(self, blob: Blob, dtype: Any, shape: tuple[int, ...]) -> LazyValue:
        """Return the sub-byte elements of `blob`, which are unpacked when they are read."""

        def read_packed() -> bytes:
            return self.read(blob.data, blob.nbytes)

        def read_elements() -> Array:
            return unpack_elements(np.frombuffer(read_packed(), np.uint8), dtype, math.prod(shape))

        return LazyValue(read_elements, shape, read_packed)

    def make_ref(self, blob: Blob) -> BlobRef:
        """Return the reference to `blob` that consts carry."""
        return BlobRef(self.path, self.name, blob.offset, blob.nbytes, self._opened)


class WeightFiles:
    """The weight files of one package, opened when a program first names them.

    `stamps` holds the stamp of each file of the package at the time it was opened; `Package` adds the model file's.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.files: dict[str, WeightFile] = {}
        self.stamps: dict[Path, tuple[int, int, int]] = {}

    def open_file(self, name: str) -> WeightFile:
        """Return the file named `name` in the program; InputError when it is missing, broken or outside the package."""
        if name not in self.files:
            file = self.files[name] = WeightFile(self.path(name), name)
            self.stamps[file.path] = file.stamp
        return self.files[name]

    def check_unchanged(self) -> None:
        """Raise InputError when files of the package were replaced or written to since they were opened."""
        for path, opened in self.stamps.items():
            if not path.exists() or get_file_stamp(path.stat()) != opened:
                raise InputError(f"{self.layout.root}: {path.name} was modified or removed after it was loaded: load "
                                 f"the package again")

    def check_opened(self) -> None:
        """Raise AnePassesError when an opened file was written to, even if it was moved or replaced since."""
        check_files_of(file.bytes for file in self.files.values())

    def path(self, name: str) -> Path:
        """Return the path of the file named `name` in the program; InputError when it is outside the package."""
        parts = name[len(MODEL_PATH) :].split("/")
        if not name.startswith(MODEL_PATH) or {"", ".", ".."} & {*parts}:
            raise InputError(f"weight file name {name!r}; expected {MODEL_PATH}<path inside the package>; {_REMEDY}")
        return check_inside(self.layout.root, self.layout.model_dir.joinpath(*parts), f"weight file name {name!r}")

    def find_blob(self, name: str, offset: int, dtype: Any, count: int) -> tuple[WeightFile, Blob]:
        """Return the blob at `offset` of file `name`, checked against the declared `count` elements of `dtype`."""
        file = self.open_file(name)
        blob = file.blob(offset)
        if blob.dtype != DTYPES.get(dtype):
            raise InputError(
                f"file {file.path}, offset {offset}: the blob has elements of "
                f"{_DTYPE_NAMES.get(blob.dtype, f'dtype {blob.dtype}')}; "
                f"expected {types.builtin_to_string(dtype)} as declared; {_REMEDY}"
            )
        expected = count_payload_bytes(dtype, count)
        if blob.nbytes != expected:
            raise InputError(
                f"file {file.path}, offset {offset}: the blob has {blob.nbytes} bytes; expected {expected} "
                f"({count} elements of {types.builtin_to_string(dtype)} as declared); {_REMEDY}"
            )
        return file, blob
