"""Changes to a package as files: bytes, manifests, blobs, and what stands in the place of a file."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mil_ane_passes.package import wire

MODEL, MANIFEST = "Data/com.apple.CoreML/model.mlmodel", "Manifest.json"
NUMBERS = (
    0, 1, 63, 64, 65, 127, 128, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 64,
    (1 << 64) - 1,
)
PATHS = (
    "", ".", "..", "../Manifest.json", "/etc/passwd", "/dev/zero", "com.apple.CoreML", "com.apple.CoreML/../../..",
    "a\0b", "\ud800", "x" * 5000, "com.apple.CoreML/model.mlmodel/x", "com.apple.CoreML//model.mlmodel", "~", "C:\\x",
)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut, doubled or put in at random places."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 16, 64, 256))
        action = rng.randrange(5)
        if action == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif action == 1:
            out[at:at + size] = rng.randbytes(len(out[at:at + size]))
        elif action == 2:
            del out[at:at + size]
        elif action == 3:
            out[at:at] = out[at:at + size] * rng.choice((1, 2, 50))
        else:
            out[at:at] = rng.randbytes(size)
    return bytes(out)


def mutate_fields(data: bytes, rng: random.Random) -> bytes:
    """A field, somewhere in the message, changed on the wire: number, wire type, length, content, how often."""
    found = _parse_or_none(lambda: list(wire.iterate_fields(data)))
    if not found:
        return data + rng.randbytes(4)
    at = rng.choice(found)
    body = data[at.body:at.end]
    if at.wire_type == wire.BYTES and rng.random() < 0.85 and _parse_or_none(lambda: list(wire.iterate_fields(body))):
        new = wire.encode_field(at.number, mutate_fields(body, rng))
    else:
        new = _mutate_field(at, data, body, rng)
    return data[:at.start] + new + data[at.end:]


def _parse_or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError:
        return None


def _mutate_field(at: wire.Field, data: bytes, body: bytes, rng: random.Random) -> bytes:
    whole = data[at.start:at.end]
    number = wire.encode_varint(rng.choice((*NUMBERS, 1 << 69)))
    return rng.choice((
        lambda: b"",
        lambda: whole * rng.choice((2, 3, 500)),
        lambda: wire.encode_varint(rng.choice((0, 1, 2, 3, 5, 20, 502, 1 << 28)) << 3 | at.wire_type) + whole[1:],
        lambda: wire.encode_varint(at.number << 3 | rng.randrange(8)) + (number + body)[: rng.choice((1, 8, 99999))],
        lambda: wire.encode_varint(at.number << 3 | wire.VARINT) + number,
        lambda: wire.encode_varint(at.number << 3 | wire.BYTES) + number + body,
        lambda: wire.encode_varint(at.number << 3 | 3) + whole + wire.encode_varint(at.number << 3 | 4),
        lambda: wire.encode_field(at.number, body * 2),
        lambda: wire.encode_field(at.number, wire.encode_field(1, body)),
        lambda: whole[:1] + b"\x80" * rng.choice((1, 5, 12)) + whole[1:],
        lambda: wire.encode_field(at.number, b"") * rng.choice((1, 3000)),
    ))()  # fmt: skip


def mutate_weights(data: bytes, rng: random.Random) -> bytes:
    """A weight file with a number of its header or of a blob's metadata set, or cut, or its blobs exchanged."""
    out = bytearray(data)
    starts = [0, *(at for at in range(64, len(out) - 63, 64) if out[at:at + 4] == b"\xef\xbe\xad\xde")]
    at = rng.choice(starts)
    action = rng.randrange(4)
    if action == 0:
        place, form = rng.choice(((0, "<I"), (4, "<I"), (8, "<Q"), (16, "<Q"), (24, "<Q"), (40, "<Q")))
        old = struct.unpack_from(form, out, at + place)[0]
        new = rng.choice((*NUMBERS, old - 1, old + 1, old - 64, old + 64, old * 2, *starts))
        struct.pack_into(form, out, at + place, new % (1 << 8 * struct.calcsize(form)))
    elif action == 1:
        other = rng.choice(starts)
        out[at:at + 64], out[other:other + 64] = out[other:other + 64], out[at:at + 64]
    elif action == 2:
        del out[rng.choice((0, 3, 63, 64, at, at + 64, len(out) - 1)):]
    else:
        return mutate_bytes(data, rng)
    return bytes(out)


def mutate_manifest(data: bytes, rng: random.Random) -> bytes:
    """A manifest with a value, a key or the text of it changed."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    held = json.loads(data)
    entries = held["itemInfoEntries"]
    key = rng.choice(sorted(entries))
    odd = rng.choice((None, 0, -1, 1e999, [], {}, "x", True, [[]] * 9, *PATHS))
    rng.choice((
        lambda: entries[key].update(path=rng.choice(PATHS)),
        lambda: entries[key].update(path=odd),
        lambda: entries.pop(key),
        lambda: entries.update({key: odd}),
        lambda: entries.update({str(odd): entries[key]}),
        lambda: held.update(rootModelIdentifier=odd),
        lambda: held.update(rootModelIdentifier=key),
        lambda: held.update(itemInfoEntries=odd),
        lambda: held.pop(rng.choice(sorted(held))),
    ))()
    text = json.dumps(held)
    if rng.random() < 0.02:
        deep = '{"a":' * 50_000 + "1" + "}" * 50_000
        text = "[" * 200_000 if rng.random() < 0.5 else f'{text[:-1]}, "y": {deep}}}'
    return text.encode("utf-8", "surrogatepass")


def replace_by_special_file(path: Path, outside: Path, rng: random.Random) -> None:
    """Puts something that is no plain file in the place of `path`."""
    path.unlink()
    rng.choice((
        lambda: os.mkfifo(path),
        lambda: os.mkdir(path),
        lambda: os.symlink("/dev/zero", path),
        lambda: os.symlink("/dev/tty", path),
        lambda: os.symlink(path.name, path),
        lambda: os.symlink(outside, path),
        lambda: os.symlink("nowhere", path),
        lambda: None,
    ))()
