"""Protobuf at wire level: a message is split into its fields as slices, and joined again from slices.

Saving replaces the changed parts of a model file and keeps every other byte. Parsing and serializing would not keep
them, because map entries lose their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = 0, 1, 2, 3, 4, 5
KEY, VALUE = 1, 2


class Field(NamedTuple):
    """One field of a message: `data[start:end]` is all of it, `data[body:end]` its payload."""

    number: int
    wire_type: int
    start: int
    body: int
    end: int


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the varint at `at`; return it and the position after it. ValueError when it is cut short or too long."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"broken varint at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def encode_varint(value: int) -> bytes:
    """Encode `value` as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def iterate_fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of message `data` in file order, a group as one field; ValueError when it is not a message."""
    at, size = 0, len(data)
    while at < size:
        start = at
        tag, at = read_varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        body = at
        if wire_type == BYTES:
            length, body = read_varint(data, at)
            at = body + length
        else:
            at = _find_group_end(data, at, number) if wire_type == GROUP else _find_field_end(data, at, wire_type)
        if at > size:
            raise ValueError(f"field {number} at byte {start} is cut short")
        yield Field(number, wire_type, start, body, at)


def _find_field_end(data: bytes, body: int, wire_type: int) -> int:
    """Return the position after a field whose tag ends at `body`."""
    if wire_type == BYTES:
        length, body = read_varint(data, body)
        return body + length
    if wire_type == VARINT:
        return read_varint(data, body)[1]
    if wire_type not in (FIXED64, FIXED32):
        raise ValueError(f"wire type {wire_type} before byte {body}")
    return body + (8 if wire_type == FIXED64 else 4)


def _find_group_end(data: bytes, at: int, number: int) -> int:
    """Return the position after the group `number` whose tag ends at `at`."""
    opened = [number]
    while opened:
        tag, at = read_varint(data, at)
        if tag & 7 == GROUP:
            opened.append(tag >> 3)
        elif tag & 7 != GROUP_END:
            at = _find_field_end(data, at, tag & 7)
        elif opened.pop() != tag >> 3:
            raise ValueError(f"group {tag >> 3} ends before byte {at} and was not begun")
    return at


def get_payloads(data: bytes, number: int) -> list[bytes]:
    """Return the payloads of all length-delimited fields `number` of message `data`."""
    return [data[f.body : f.end] for f in iterate_fields(data) if f.number == number and f.wire_type == BYTES]


def encode_field(number: int, payload: bytes) -> bytes:
    """Encode `payload` as length-delimited field `number`."""
    return encode_varint(number << 3 | BYTES) + encode_varint(len(payload)) + payload


def get_entry_key(entry: bytes) -> str:
    """Return the key of map entry `entry` (maps of the model format have string keys)."""
    keys = get_payloads(entry, KEY)
    return keys[-1].decode() if keys else ""


def get_entry_value(entry: bytes) -> bytes:
    """Return the message in map entry `entry`; ValueError when there are several, which a parser would merge."""
    values = get_payloads(entry, VALUE)
    if len(values) > 1:
        raise ValueError(f"map entry {get_entry_key(entry)!r} has {len(values)} values")
    return values[0] if values else b""


def encode_entry(key: str, value: bytes) -> bytes:
    """Encode a map entry."""
    return encode_field(KEY, key.encode()) + encode_field(VALUE, value)


def replace_fields(data: bytes, number: int, new: Sequence[bytes]) -> bytes:
    """Return `data` with its fields `number` replaced by `new`, the rest byte for byte.

    If the number of fields is unchanged, each new field takes the position of an old one. Otherwise all new fields are
    written at the position of the first old one.
    """
    old = get_payloads(data, number)
    if old == list(new):
        return data
    if len(old) == len(new):
        left = iter(zip(old, new, strict=True))

        def replace_field(f: Field, payload: bytes) -> bytes | None:
            before, after = next(left) if f.number == number else (payload, payload)
            return None if before == after else after

        return edit_payloads(data, replace_field)
    out: list[bytes] = []
    written = False
    for f in iterate_fields(data):
        if f.number != number:
            out.append(data[f.start : f.end])
        elif not written:
            out.extend(encode_field(number, payload) for payload in new)
            written = True
    if not written:
        out.extend(encode_field(number, payload) for payload in new)
    return b"".join(out)


def edit_payloads(data: bytes, change: Callable[[Field, bytes], bytes | None]) -> bytes:
    """Return `data` with length-delimited payloads replaced by the result of `change`; None keeps a payload.

    All other bytes are unchanged.
    """
    out: list[bytes] = []
    changed = False
    for f in iterate_fields(data):
        new = change(f, data[f.body : f.end]) if f.wire_type == BYTES else None
        changed = changed or new is not None
        out.append(data[f.start : f.end] if new is None else encode_field(f.number, new))
    return b"".join(out) if changed else data
