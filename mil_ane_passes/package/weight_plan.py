"""The plan for a package's weights: blobs that are referred to, new blobs, and their offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Var, types

from ..ir.constants import LazyValue, get_blob_ref
from ..ir.coremltools_internals import get_typed_value
from ..utils.mapped_files import is_mapped, iterate_rows
from .blobs import ALIGN, DTYPES, MODEL_PATH, Array, Blob, WeightFile, WeightFiles, align_up, count_payload_bytes

WEIGHT_FILE = f"{MODEL_PATH}weights/weight.bin"
_COMPARE_PIECE_BYTES = 1 << 20
"Bytes that are read and compared at once: large enough that system calls cost little, small enough for any machine."
_MIN_VIEW_BYTES = 1 << 20
"Smallest part of a weight in a mapped file, in bytes, that is written from the mapping and not copied to memory first."
_PREFIX_BYTES = 64
"Bytes at the start of a blob that are the lookup key for equal blobs; candidates are then compared in full."
DEAD_LIMIT = 0.01
"""Dead blobs are dropped if they are more than this fraction of a weight file, unless a plan has another limit.

Dropping means writing the entire file again. Below 1 % the file is cloned or copied instead, which is much faster.
"""


@dataclass(frozen=True)
class NewBlob:
    """Values that are in no weight file yet (contiguous, or a view of a mapped file), and their assigned offset."""

    offset: int
    dtype: Any
    value: Array


@dataclass
class WeightPlan:
    """Assigns every const to a blob: to the one it is a view of, or to a new one at the end of the weight file."""

    files: WeightFiles
    added: list[NewBlob] = field(default_factory=list)
    dead_limit: float = DEAD_LIMIT

    def __post_init__(self) -> None:
        self._offsets: dict[tuple[int, int, bytes], int] = {}
        self._starts: dict[str, dict[int, Blob]] = {}
        self._by_start: dict[tuple[int, int, bytes], list[tuple[WeightFile, Blob]]] | None = None
        self.target = self._find_target_file()
        opened = self.files.files.get(self.target or "")
        self._end = opened.size if opened is not None else ALIGN

    def _find_target_file(self) -> str | None:
        """Return the weight file for new blobs; None if the package has no weight file and none can be added."""
        path = self.files.path(WEIGHT_FILE)
        if path.is_file():
            self.files.open_file(WEIGHT_FILE)
        if path.is_file() or self.files.layout.has_item(path.parent):
            return WEIGHT_FILE
        return next(iter(self.files.files), None)

    def find_existing(self, var: Var) -> tuple[str, int] | None:
        """Return the file name and offset of the blob that holds the bytes of const `var`; None when they are new."""
        code = DTYPES.get(var.dtype) if not types.is_list(var.sym_type) else None
        if code is None:
            return None
        lazy = isinstance(get_typed_value(var), LazyValue)
        ref = get_blob_ref(var)
        file = self.files.files.get(ref.name) if ref is not None else None
        if ref is not None and file is not None and file.path == ref.file:
            blob = file.blob(ref.offset)
            if _has_same_type_and_size(blob, code, var) and (lazy or _has_same_bytes(file, blob, np.asarray(var.val))):
                return ref.name, ref.offset
        return None if lazy or not isinstance(var.val, np.ndarray) else self._find_viewed_blob(var.val, code)

    def _find_viewed_blob(self, value: Array, code: int) -> tuple[str, int] | None:
        if not value.flags.c_contiguous:
            return None
        for name, file in self.files.files.items():
            at = _get_address(value) - _get_address(file.bytes)
            if 0 <= at < file.size:
                starts = self._starts.setdefault(name, {blob.data: blob for blob in file.known_blobs})
                blob = starts.get(at)
                if blob is not None and blob.dtype == code and blob.nbytes == value.nbytes:
                    return name, blob.offset
        return None

    def add_blob(self, var: Var) -> tuple[str, int]:
        """Assign a file name and offset to the bytes of const `var`, which is not a view of a file.

        Equal bytes share a blob.

        The value is held until the package is written, so new values occupy memory until then. The exception is a part
        of a weight in a mapped file of at least 1 MB: it is read from the file when it is written.
        """
        assert self.target is not None
        dtype = None if types.is_sub_byte(var.dtype) else types.nptype_from_builtin(var.dtype)
        value = np.asarray(var.val)
        if value.dtype != dtype or value.nbytes < _MIN_VIEW_BYTES or not is_mapped(value):
            value = np.ascontiguousarray(value, dtype)
        nbytes = count_payload_bytes(var.dtype, value.size)
        if nbytes == value.nbytes and (twin := self._find_equal_blob(DTYPES[var.dtype], value)) is not None:
            return twin
        key = (DTYPES[var.dtype], value.nbytes, _compute_digest(value))
        if key not in self._offsets:
            offset = align_up(self._end)
            self._end = offset + ALIGN + nbytes
            self._offsets[key] = offset
            self.added.append(NewBlob(offset, var.dtype, value))
        return self.target, self._offsets[key]

    def _find_equal_blob(self, code: int, value: Array) -> tuple[str, int] | None:
        """Find the file name and offset of a blob with the bytes of `value`, such as a const of another function."""
        if self._by_start is None:
            self._by_start = {}
            for file in self.files.files.values():
                for blob in file.known_blobs:
                    start = file.read(blob.data, min(_PREFIX_BYTES, blob.nbytes))
                    self._by_start.setdefault((blob.dtype, blob.nbytes, start), []).append((file, blob))
        first = value if value.flags.c_contiguous else next(iterate_rows(value))
        start = first.reshape(-1)[:_PREFIX_BYTES].view(np.uint8)[:_PREFIX_BYTES].tobytes()
        found = self._by_start.get((code, value.nbytes, start), ())
        return next(((file.name, blob.offset) for file, blob in found if is_equal_to_blob(file, blob, value)), None)


def find_live_blobs(files: WeightFiles, refs: set[tuple[str, int]]) -> dict[str, list[Blob]]:
    """Return for each open weight file the blobs among `refs`, in file order; new blobs are left out."""
    live: dict[str, list[Blob]] = {name: [] for name in files.files}
    for name, offset in sorted(refs):
        file = files.open_file(name)
        live.setdefault(name, [])
        if offset < file.size:
            live[name].append(file.blob(offset))
    return live


def compute_packed_offsets(blobs: list[Blob]) -> tuple[dict[int, int], int]:
    """Return the offset of each blob when they are packed without gaps, and the resulting file size."""
    moved: dict[int, int] = {}
    end = ALIGN
    for blob in blobs:
        moved[blob.offset] = align_up(end)
        end = moved[blob.offset] + ALIGN + blob.nbytes
    return moved, end


def plan_blob_moves(
    files: WeightFiles, added: list[NewBlob], target: str | None, live: Mapping[str, list[Blob]], limit: float,
    gaps: bool = False,
) -> dict[str, dict[int, int]]:
    """Plan the new offsets of blobs in each weight file of which more than the fraction `limit` is dead.

    The blobs `added` go to the end of the file `target`. `gaps` means that some new blobs between them were dropped.
    """
    moves: dict[str, dict[int, int]] = {}
    known = {**live, **({target: []} if gaps and added and target and target not in live else {})}
    for name, blobs in known.items():
        moved, end = compute_packed_offsets(blobs)
        size = files.files[name].size if name in files.files else 0
        if size - end <= limit * size and not (gaps and name == target):
            continue
        for new in added if name == target else ():
            moved[new.offset] = align_up(end)
            end = moved[new.offset] + ALIGN + count_payload_bytes(new.dtype, new.value.size)
        moves[name] = moved
    return moves


def _has_same_type_and_size(blob: Blob, code: int, var: Var) -> bool:
    count = int(np.prod(var.shape, dtype=np.int64))
    return blob.dtype == code and blob.nbytes == count_payload_bytes(var.dtype, count)


def _has_same_bytes(file: WeightFile, blob: Blob, value: Array) -> bool:
    """Return whether `blob` has the bytes of `value`: by address for a view, else by comparing them piece by piece."""
    if value.nbytes != blob.nbytes:
        return False
    if value.flags.c_contiguous and _get_address(value) == _get_address(file.bytes) + blob.data:
        return True
    return is_equal_to_blob(file, blob, np.ascontiguousarray(value))


def is_equal_to_blob(file: WeightFile, blob: Blob, value: Array) -> bool:
    """Return whether `blob` has the bytes of `value`, which has the same length."""
    if not value.flags.c_contiguous:
        at = blob.data
        for rows in iterate_rows(value):
            if file.read(at, rows.nbytes) != rows.reshape(-1).view(np.uint8).data:
                return False
            at += rows.nbytes
        return True
    ours = memoryview(value.reshape(-1).view(np.uint8).data)
    pieces = range(0, blob.nbytes, _COMPARE_PIECE_BYTES)
    return all(file.read(blob.data + i, len(ours[i : i + _COMPARE_PIECE_BYTES])) == ours[i : i + _COMPARE_PIECE_BYTES]
               for i in pieces)


def _compute_digest(value: Array) -> bytes:
    if value.flags.c_contiguous:
        return hashlib.sha256(value.reshape(-1).view(np.uint8).data).digest()
    digest = hashlib.sha256()
    for rows in iterate_rows(value):
        digest.update(rows.reshape(-1).view(np.uint8).data)
    return digest.digest()


def _get_address(value: Array) -> int:
    return int(value.__array_interface__["data"][0])
