"""References to weight files inside a model file: search and replacement at wire level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from coremltools import proto

from . import wire
from .blobs import MODEL_PATH

_BLOB_DESCRIPTOR = proto.MIL_pb2.Value.BlobFileValue.DESCRIPTOR
_FILE_NAME_FIELD, _OFFSET_FIELD = 1, 2
# A message without this prefix contains no reference. The substring search is fast and skips most messages.
_MODEL_PATH_BYTES = MODEL_PATH.encode()


def find_refs(raw: bytes) -> set[tuple[str, int]]:
    """Return the file name and offset of every reference in model file `raw`."""
    found: set[tuple[str, int]] = set()

    def record_ref(data: bytes) -> bytes:
        found.add(_read_ref(data))
        return data

    _visit_refs(raw, proto.Model_pb2.Model.DESCRIPTOR, record_ref)
    return found


def move_refs(raw: bytes, moves: Mapping[str, Mapping[int, int]]) -> bytes:
    """Return model file `raw` with the offsets in `moves` replaced by the new ones, and the rest byte for byte."""
    places = {(name, old): (name, new) for name, moved in moves.items() for old, new in moved.items()}
    return redirect_refs(raw, places)


def redirect_refs(raw: bytes, places: Mapping[tuple[str, int], tuple[str, int]]) -> bytes:
    """Return model file `raw` with references replaced as `places` maps (file, offset) to (file, offset), the rest
    unchanged."""

    def redirect_ref(data: bytes) -> bytes:
        old = _read_ref(data)
        name, offset = places.get(old, old)
        if (name, offset) == old:
            return data
        changed = {_FILE_NAME_FIELD: name != old[0], _OFFSET_FIELD: offset != old[1]}
        kept = b"".join(data[f.start : f.end] for f in wire.iterate_fields(data) if not changed.get(f.number, False))
        if changed[_FILE_NAME_FIELD]:
            kept += wire.encode_field(_FILE_NAME_FIELD, name.encode())
        return kept + (
            wire.encode_varint(_OFFSET_FIELD << 3 | wire.VARINT) + wire.encode_varint(offset)
            if changed[_OFFSET_FIELD]
            else b""
        )

    return _visit_refs(raw, proto.Model_pb2.Model.DESCRIPTOR, redirect_ref) if places else raw


def _visit_refs(data: bytes, descriptor: Any, change: Callable[[bytes], bytes]) -> bytes:
    if _MODEL_PATH_BYTES not in data:
        return data
    if descriptor.full_name == _BLOB_DESCRIPTOR.full_name:
        return change(data)
    inner = _get_message_fields(descriptor.full_name, descriptor)

    def visit_field(f: wire.Field, payload: bytes) -> bytes | None:
        if f.number not in inner:
            return None
        new = _visit_refs(payload, inner[f.number], change)
        return None if new is payload else new

    return wire.edit_payloads(data, visit_field)


@cache
def _get_message_fields(_: str, descriptor: Any) -> dict[int, Any]:
    """Return the message types of a message type's submessage fields, by field number."""
    return {f.number: f.message_type for f in descriptor.fields if f.message_type is not None}


def _read_ref(data: bytes) -> tuple[str, int]:
    names = wire.get_payloads(data, _FILE_NAME_FIELD)
    offsets = [wire.read_varint(data, f.body)[0] for f in wire.iterate_fields(data) if f.number == _OFFSET_FIELD]
    return (names[-1].decode() if names else ""), (offsets[-1] if offsets else 0)
