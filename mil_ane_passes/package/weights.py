"""Weight files of a saved package: copied, appended to, or with the live blobs alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from coremltools.converters.mil.backend.mil import helper
from coremltools.libmilstoragepython import _BlobStorageWriter

from .ahead import CopyAhead
from .blobs import ALIGN, DATA_OFFSET_AT, HEADER, VERSION, Blob, WeightFile
from .files import copy_file, copy_range, write_all
from .plan import NewBlob

# More than a disk that has just been full may still have in its last block.
_PROBE = 1 << 20


def write_weights(
    source: WeightFile | None, target: Path, live: list[Blob], moved: Mapping[int, int] | None,
    added: list[NewBlob], ahead: CopyAhead | None = None,
) -> None:
    """Writes weight file `target`: `source`, or only its `live` blobs when they are `moved`, then the `added` ones."""
    if source is not None and moved is None:
        if ahead is None or not ahead.take(source.path, target):
            copy_file(source.path, target)
    elif source is not None:
        _repack(source, target, live, moved or {})
    _append(target, added, moved or {})


def _repack(source: WeightFile, target: Path, live: list[Blob], moved: Mapping[int, int]) -> None:
    with open(source.path, "rb") as src, open(target, "xb") as dst:
        out = dst.fileno()
        write_all(out, HEADER.pack(len(live), VERSION).ljust(ALIGN, b"\0"), 0)
        for blob in live:
            offset = moved[blob.offset]
            metadata = bytearray(source.metadata(blob.offset))
            metadata[DATA_OFFSET_AT : DATA_OFFSET_AT + 8] = (offset + ALIGN).to_bytes(8, "little")
            write_all(out, bytes(metadata), offset)
            copy_range(src.fileno(), out, blob.data, offset + ALIGN, blob.nbytes)


def _append(target: Path, added: list[NewBlob], moved: Mapping[int, int]) -> None:
    if not added:
        return
    if target.exists():
        # Permissions are the source's only when all is written; a read-only source must not stop the writer.
        target.chmod(0o600)
    try:
        _write(target, added, moved)
    except RuntimeError as error:
        raise _reason(target) or OSError(f"{error}") from error


def _write(target: Path, added: list[NewBlob], moved: Mapping[int, int]) -> None:
    writer = _BlobStorageWriter(os.fspath(target), truncate_file=not target.exists())
    for blob in added:
        offset = helper._get_offset_by_writing_data(blob.source, writer)
        expected = moved.get(blob.offset, blob.offset)
        if offset != expected:
            raise OSError(f"{target}: a blob was written at {offset}, {expected} expected")
    del writer


def _reason(target: Path) -> OSError | None:
    """Why the host's writer could not write, which it does not say: what the system says to a write behind the end."""
    try:
        with open(target, "ab") as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None
