"""Blobs of weight files that hold the same bytes, found without reading a whole file at once.

Files are read in pieces with pread: pages of a mapping would count as memory of the process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from .blobs import ALIGN, DATA_OFFSET_AT, Blob, WeightFiles

__all__ = ["DuplicateGroup", "Duplicates", "Ref", "find_duplicates"]

Ref = tuple[str, int]
"The weight file's name as the program spells it, and the offset of a blob in it."
_PIECE_BYTES = 1 << 20
"Bytes that are read at once: large enough that system calls cost little, small enough for any machine."
_PREFIX_BYTES = 1 << 12
"Bytes at the start of a blob that are compared first: enough to distinguish most blobs."


@dataclass(frozen=True)
class DuplicateGroup:
    """Blobs that hold the same bytes of the same dtype; the first is kept. `nbytes` is the size of each in bytes."""

    nbytes: int
    places: tuple[Ref, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes of data that are freed when only one blob is kept."""
        return self.nbytes * (len(self.places) - 1)


@dataclass(frozen=True)
class Duplicates:
    """The result of `find_duplicates`: of each group in `equal`, one blob is enough; the blobs of a group in
    `equal_with_other_dtype` have equal bytes but different dtypes, so all of them are needed."""

    equal: tuple[DuplicateGroup, ...]
    equal_with_other_dtype: tuple[DuplicateGroup, ...]


def find_duplicates(files: WeightFiles, refs: Iterable[Ref]) -> Duplicates:
    """Group the blobs among `refs` that hold the same bytes, in the order of `refs`. Groups have two or more members.

    Raises InputError if a reference does not lead to a blob, OSError if a file cannot be read.
    """
    equal, apart = [], []
    with _BlobReaders(files) as read:
        groups = [sorted(set(refs))]
        for key in (read.get_size, read.read_prefix, read.compute_digest):
            groups = [part for group in groups for part in _split_without_singles(group, key)]
        for group in groups:
            kinds = _split_by_key(group, read.read_kind)
            equal += [same for kind in kinds if len(same := read.select_equal(kind)) > 1]
            if len(kinds) > 1:
                apart.append(sorted(kind[0] for kind in kinds))
        sized = [sorted((DuplicateGroup(read.get_size(refs[0]), tuple(refs)) for refs in found), key=lambda g: g.places)
                 for found in (equal, apart)]
    return Duplicates(tuple(sized[0]), tuple(sized[1]))


def _split_by_key(group: list[Ref], key: Callable[[Ref], Hashable]) -> list[list[Ref]]:
    """Partition `group` into lists of members with an equal `key`."""
    parts: dict[Hashable, list[Ref]] = {}
    for ref in group:
        parts.setdefault(key(ref), []).append(ref)
    return list(parts.values())


def _split_without_singles(group: list[Ref], key: Callable[[Ref], Hashable]) -> Iterator[list[Ref]]:
    """Partition `group` by `key`, leaving out lists of one member."""
    return (part for part in _split_by_key(group, key) if len(part) > 1)


class _BlobReaders(ExitStack):
    """Weight files opened for reading in pieces; their blobs are compared by size, prefix, digest and bytes."""

    def __init__(self, files: WeightFiles) -> None:
        super().__init__()
        self._files = files
        self._open: dict[str, int] = {}

    def __enter__(self) -> _BlobReaders:
        return self

    def blob(self, ref: Ref) -> Blob:
        return self._files.open_file(ref[0]).blob(ref[1])

    def get_size(self, ref: Ref) -> int:
        return self.blob(ref).nbytes

    def read_kind(self, ref: Ref) -> Hashable:
        """Return a blob's metadata (dtype, size, padding) without the offset of its data."""
        metadata = os.pread(self._open_file(ref[0]), ALIGN, ref[1])
        return metadata[:DATA_OFFSET_AT] + metadata[DATA_OFFSET_AT + 8 :]

    def read_prefix(self, ref: Ref) -> Hashable:
        """Return the first bytes: enough to distinguish most blobs."""
        return next(self._iterate_pieces(ref, _PREFIX_BYTES), b"")

    def compute_digest(self, ref: Ref) -> Hashable:
        found = hashlib.blake2b(digest_size=32)
        for piece in self._iterate_pieces(ref):
            found.update(piece)
        return found.digest()

    def select_equal(self, group: list[Ref]) -> list[Ref]:
        """Return the members of `group` whose bytes equal those of the first.

        Different bytes can have an equal digest, so the bytes themselves are compared.
        """
        return [group[0], *(ref for ref in group[1:] if self._has_equal_bytes(group[0], ref))]

    def _has_equal_bytes(self, first: Ref, second: Ref) -> bool:
        return all(a == b for a, b in zip(self._iterate_pieces(first), self._iterate_pieces(second), strict=True))

    def _iterate_pieces(self, ref: Ref, size: int = _PIECE_BYTES) -> Iterator[bytes]:
        blob, handle = self.blob(ref), self._open_file(ref[0])
        for at in range(0, blob.nbytes, size):
            wanted = min(size, blob.nbytes - at)
            piece = os.pread(handle, wanted, blob.data + at)
            if len(piece) != wanted:
                raise OSError(f"{self._files.open_file(ref[0]).path} ends after {blob.data + at + len(piece)} bytes")
            yield piece

    def _open_file(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._files.open_file(name).path, os.O_RDONLY)
            self.callback(os.close, self._open[name])
        return self._open[name]
