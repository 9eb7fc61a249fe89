"""Writing of a saved package's weight files: copied, appended to, or reduced to the live blobs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from coremltools.converters.mil.mil import types
from coremltools.optimize import _utils as optimize_utils

from ..utils.mapped_files import iterate_rows
from .blobs import (
    ALIGN,
    DATA_OFFSET_AT,
    DTYPES,
    HEADER,
    METADATA,
    SENTINEL,
    VERSION,
    Blob,
    WeightFile,
    count_payload_bytes,
)
from .copy_ahead import CopyAhead
from .files import copy_file, copy_range, write_all
from .weight_plan import NewBlob

# Packing needs eight bytes of memory for each element, so elements are packed in pieces of 8 MB. A piece must have a
# multiple of eight elements: it then ends at a byte boundary.
_PACK_PIECE_ELEMENTS = 1 << 20


def write_weights(
    source: WeightFile | None, target: Path, live: list[Blob], moved: Mapping[int, int] | None,
    added: list[NewBlob], ahead: CopyAhead | None = None,
) -> None:
    """Write the weight file `target`: all of `source`, or only its `live` blobs if these are `moved`; then `added`."""
    if source is not None and moved is None:
        if ahead is None or not ahead.take_copy(source.path, target):
            copy_file(source.path, target)
    elif source is not None:
        _write_live_blobs(source, target, live, moved or {})
    _append_blobs(target, added, moved or {})


def _write_live_blobs(source: WeightFile, target: Path, live: list[Blob], moved: Mapping[int, int]) -> None:
    with open(source.path, "rb") as src, open(target, "xb") as dst:
        out = dst.fileno()
        write_all(out, HEADER.pack(len(live), VERSION).ljust(ALIGN, b"\0"), 0)
        for blob in live:
            offset = moved[blob.offset]
            metadata = bytearray(source.read_metadata(blob.offset))
            metadata[DATA_OFFSET_AT : DATA_OFFSET_AT + 8] = (offset + ALIGN).to_bytes(8, "little")
            write_all(out, bytes(metadata), offset)
            copy_range(src.fileno(), out, blob.data, offset + ALIGN, blob.nbytes)


def _append_blobs(target: Path, added: list[NewBlob], moved: Mapping[int, int]) -> None:
    if not added:
        return
    if target.exists():
        # A copy of a read-only source is read-only; its permissions are restored after everything is written.
        target.chmod(0o600)
    with open(target, "r+b" if target.exists() else "w+b") as file:
        out = file.fileno()
        count = HEADER.unpack(os.pread(out, HEADER.size, 0).ljust(HEADER.size, b"\0"))[0]
        write_all(out, HEADER.pack(count + len(added), VERSION).ljust(ALIGN, b"\0"), 0)
        for blob in added:
            _write_blob(out, blob, moved.get(blob.offset, blob.offset))


def _write_blob(out: int, blob: NewBlob, offset: int) -> None:
    """Write one blob in the format of coremltools' writer, which would copy the values twice and hide the OS error."""
    nbytes = count_payload_bytes(blob.dtype, blob.value.size)
    unused = 8 * nbytes - blob.value.size * blob.dtype.get_bitwidth() if types.is_sub_byte(blob.dtype) else 0
    metadata = METADATA.pack(SENTINEL, DTYPES[blob.dtype], nbytes, offset + ALIGN, unused)
    write_all(out, metadata.ljust(ALIGN, b"\0"), offset)
    at = offset + ALIGN
    for piece in _iterate_pieces(blob):
        write_all(out, piece, at)
        at += len(piece)


def _iterate_pieces(blob: NewBlob) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a blob piece by piece."""
    if not blob.value.flags.c_contiguous:
        for rows in iterate_rows(blob.value):
            yield rows.reshape(-1).view(np.uint8).data
        return
    flat = blob.value.reshape(-1)
    if not types.is_sub_byte(blob.dtype):
        yield flat.view(np.uint8).data
        return
    for at in range(0, flat.size, _PACK_PIECE_ELEMENTS):
        some = flat[at : at + _PACK_PIECE_ELEMENTS]
        yield optimize_utils.pack_elements_into_bits(some, blob.dtype.get_bitwidth()).tobytes()
