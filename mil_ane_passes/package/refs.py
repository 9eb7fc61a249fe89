"""References to weight files inside a model file: found and changed at wire level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from coremltools import proto

from . import wire
from .blobs import MODEL_PATH

_BLOB = proto.MIL_pb2.Value.BlobFileValue.DESCRIPTOR
_FILE_NAME, _OFFSET = 1, 2
# Nothing without a file name in it has a reference in it; looking for that is quick.
_MARK = MODEL_PATH.encode()


def find_refs(raw: bytes) -> set[tuple[str, int]]:
    """The file name and offset of every reference in model file `raw`."""
    found: set[tuple[str, int]] = set()

    def note(data: bytes) -> bytes:
        found.add(_read(data))
        return data

    _visit(raw, proto.Model_pb2.Model.DESCRIPTOR, note)
    return found


def move_refs(raw: bytes, moves: Mapping[str, Mapping[int, int]]) -> bytes:
    """Model file `raw` with the offsets that `moves` has a new one for changed, and the rest byte for byte."""
    places = {(name, old): (name, new) for name, moved in moves.items() for old, new in moved.items()}
    return redirect_refs(raw, places)


def redirect_refs(raw: bytes, places: Mapping[tuple[str, int], tuple[str, int]]) -> bytes:
    """Model file `raw` with the references that `places` has another file and offset for changed, the rest as it is."""

    def redirect(data: bytes) -> bytes:
        old = _read(data)
        name, offset = places.get(old, old)
        if (name, offset) == old:
            return data
        changed = {_FILE_NAME: name != old[0], _OFFSET: offset != old[1]}
        kept = b"".join(data[f.start : f.end] for f in wire.fields(data) if not changed.get(f.number, False))
        if changed[_FILE_NAME]:
            kept += wire.field(_FILE_NAME, name.encode())
        return kept + (wire.varint(_OFFSET << 3 | wire.VARINT) + wire.varint(offset) if changed[_OFFSET] else b"")

    return _visit(raw, proto.Model_pb2.Model.DESCRIPTOR, redirect) if places else raw


def _visit(data: bytes, descriptor: Any, change: Callable[[bytes], bytes]) -> bytes:
    if _MARK not in data:
        return data
    if descriptor.full_name == _BLOB.full_name:
        return change(data)
    inner = _messages(descriptor.full_name, descriptor)

    def visit(f: wire.Field, payload: bytes) -> bytes | None:
        if f.number not in inner:
            return None
        new = _visit(payload, inner[f.number], change)
        return None if new is payload else new

    return wire.edit(data, visit)


@cache
def _messages(_: str, descriptor: Any) -> dict[int, Any]:
    """The fields of a message type that are messages."""
    return {f.number: f.message_type for f in descriptor.fields if f.message_type is not None}


def _read(data: bytes) -> tuple[str, int]:
    names = wire.payloads(data, _FILE_NAME)
    offsets = [wire.read_varint(data, f.body)[0] for f in wire.fields(data) if f.number == _OFFSET]
    return (names[-1].decode() if names else ""), (offsets[-1] if offsets else 0)
