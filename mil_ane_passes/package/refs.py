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

    def move(data: bytes) -> bytes:
        name, offset = _read(data)
        new = moves.get(name, {}).get(offset, offset)
        if new == offset:
            return data
        kept = b"".join(data[f.start : f.end] for f in wire.fields(data) if f.number != _OFFSET)
        return kept + wire.varint(_OFFSET << 3 | wire.VARINT) + wire.varint(new)

    return _visit(raw, proto.Model_pb2.Model.DESCRIPTOR, move) if moves else raw


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
