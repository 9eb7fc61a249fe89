"""What differs between the model files of two packages, read with nothing of the package layer.

An own scan of the wire format: a fault in mil_ane_passes.package.wire cannot hide here. Bytes are compared, never
parsed messages: order, unknown fields and doc strings count.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

MODEL = "Data/com.apple.CoreML/model.mlmodel"
MODEL_DIR = Path(MODEL).parent
PROGRAM, FUNCTIONS = 502, 2
OPSET, BLOCKS_OF_FUNCTION = 2, 3
OPERATIONS = 3
TYPE, INPUTS, OUTPUTS, BLOCKS_OF_OP = 1, 2, 3, 4

# Which fields of which messages lead to a reference into a weight file.
_INNER = {
    "op": {2: "input", 4: "block", 5: "attribute"},
    "input": {2: "argument"},
    "argument": {1: "binding"},
    "binding": {2: "value"},
    "attribute": {2: "value"},
    "value": {5: "blob"},
    "block": {3: "op", 4: "attribute"},
}

Place = tuple[str, int]
"The name a program has for a weight file, and the offset of a blob's metadata in it."


@dataclass
class Ops:
    """How the ops of one block changed. An op is known by its first output; one in a block of another by both.

    `same_order`: whether those that are the same follow one another as they did."""

    removed: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    same_order: bool = True

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.changed or not self.same_order)


@dataclass
class Diff:
    """`outside` has the paths of what differs and is no op; `functions` the ops of each function that has changes."""

    outside: list[str] = field(default_factory=list)
    functions: dict[str, Ops] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.outside or self.functions)


def proto_diff(before: Path, after: Path, *, moved: bool = False) -> Diff:
    """The differences of two packages' model files; with `moved`, blobs are compared by their bytes, not offsets."""
    shown = tuple(_content(path) if moved else None for path in (before, after))
    diff = Diff()
    old, new = ((path / MODEL).read_bytes() for path in (before, after))
    _frame("model", old, new, {PROGRAM}, diff)
    one, other = (_only(data, PROGRAM) for data in (old, new))
    _frame("program", one, other, {FUNCTIONS}, diff)
    functions = [[(_text(e, 1), _only(e, 2)) for e in _all(data, FUNCTIONS)] for data in (one, other)]
    if [name for name, _ in functions[0]] != [name for name, _ in functions[1]]:
        diff.outside.append("program/functions")
        return diff
    for (name, ours), (_, theirs) in zip(*functions):
        _function(name, (ours, theirs), shown, diff)
    return diff


def _function(name: str, pair: tuple[bytes, bytes], shown: tuple[Shown | None, ...], diff: Diff) -> None:
    _frame(f"function {name}", *pair, {BLOCKS_OF_FUNCTION}, diff)
    blocks = [{_text(e, 1): _only(e, 2) for e in _all(data, BLOCKS_OF_FUNCTION)} for data in pair]
    opset = _text(pair[0], OPSET)
    if blocks[0].keys() != blocks[1].keys() or any(blocks[0][k] != blocks[1][k] for k in blocks[0] if k != opset):
        diff.outside.append(f"function {name}/blocks")
        return
    _frame(f"function {name}/block", blocks[0][opset], blocks[1][opset], {OPERATIONS}, diff)
    ops = Ops()
    _block("", (blocks[0][opset], blocks[1][opset]), shown, ops)
    if ops:
        diff.functions[name] = ops


def _block(around: str, pair: tuple[bytes, ...], shown: tuple[Shown | None, ...], found: Ops) -> None:
    old, new = (named_ops(data) for data in pair)
    found.removed |= {around + name for name in old if name not in new}
    found.added |= {around + name for name in new if name not in old}
    same = {n for n in old.keys() & new.keys() if _shown(old[n], "op", shown[0]) == _shown(new[n], "op", shown[1])}
    found.same_order &= [name for name in old if name in same] == [name for name in new if name in same]
    for name in old:
        if name in new and name not in same:
            _op(around + name, (old[name], new[name]), shown, found)


def _op(name: str, pair: tuple[bytes, bytes], shown: tuple[Shown | None, ...], found: Ops) -> None:
    """A changed op: only what is in its blocks, where that is all."""
    blocks = [_all(data, BLOCKS_OF_OP) for data in pair]
    frames = [[_shown(each, "op", content, {BLOCKS_OF_OP}), *(_shown(b, "block", content, {OPERATIONS}) for b in inner)]
              for each, inner, content in zip(pair, blocks, shown)]
    if frames[0] != frames[1]:
        found.changed.add(name)
        return
    for number, two in enumerate(zip(*blocks)):
        _block(f"{name}/{number}/", two, shown, found)


def named_ops(block: bytes) -> dict[str, bytes]:
    """The ops of a block by first output; those without one, and names met again, get a number behind them."""
    seen: Counter[str] = Counter()
    ops = {}
    for op in _all(block, OPERATIONS):
        outputs = _all(op, OUTPUTS)
        name = _text(outputs[0], 1) if outputs else _text(op, TYPE)
        seen[name] += 1
        ops[name if outputs and seen[name] == 1 else f"{name} {seen[name]}"] = op
    return ops


def ops_of(path: Path) -> dict[str, dict[str, bytes]]:
    """The ops of each function of a package (not those in blocks of others), by name."""
    found = {}
    for entry in _all(_only((path / MODEL).read_bytes(), PROGRAM), FUNCTIONS):
        body = _only(entry, 2)
        blocks = {_text(e, 1): _only(e, 2) for e in _all(body, BLOCKS_OF_FUNCTION)}
        found[_text(entry, 1)] = named_ops(blocks[_text(body, OPSET)])
    return found


def reads(op: bytes) -> set[str]:
    """The names of the values an op reads, in its blocks too."""
    bound = [b for entry in _all(op, INPUTS) for argument in _all(entry, 2) for b in _all(argument, 1)]
    found = {_text(each, 1) for each in bound} - {""}
    for block in _all(op, BLOCKS_OF_OP):
        found.update(*(reads(each) for each in _all(block, OPERATIONS)), map(bytes.decode, _all(block, 2)))
    return found


def is_const(op: bytes) -> bool:
    """Whether an op is a const."""
    return _text(op, TYPE) == "const"


def consts(path: Path) -> dict[tuple[str, str], Place]:
    """Where in the weight files each const op of a package's functions (not of blocks in them) lies."""
    found = {}
    for function, ops in ops_of(path).items():
        for name, op in ops.items():
            places = list(_places(op, "op")) if is_const(op) else []
            if places:
                found[function, name] = places[0]
    return found


def blob(path: Path, place: Place) -> tuple[bytes, bytes]:
    """What a blob's metadata says of its numbers, and their bytes."""
    name, offset = place
    with open(path / MODEL_DIR / name.removeprefix("@model_path/"), "rb") as file:
        file.seek(offset)
        metadata = file.read(64)
        size, at = (int.from_bytes(metadata[i : i + 8], "little") for i in (8, 16))
        file.seek(at)
        data = file.read(size)
    assert int.from_bytes(metadata[:4], "little") == 0xDEADBEEF and len(data) == size, place
    return metadata[4:8] + metadata[24:32], data


Shown = Callable[[Place], bytes]


def _content(path: Path) -> Shown:
    known: dict[Place, bytes] = {}

    def digest(place: Place) -> bytes:
        if place not in known:
            known[place] = hashlib.sha256(b"".join(blob(path, place))).digest()
        return known[place]

    return digest


def _shown(data: bytes, kind: str, content: Shown | None, without: Set[int] = frozenset()) -> bytes:
    """`data` with what each reference leads to in the place of its offset, and without some of its fields."""
    if not without and (content is None or b"@model_path" not in data):
        return data
    if kind == "blob" and content is not None:
        return _text(data, 1).encode() + content(_place(data))
    inner = _INNER.get(kind, {})
    return b"".join(
        tag + (_shown(payload, inner[number], content) if number in inner else payload)
        for number, tag, payload in _scan(data) if number not in without)


def _places(data: bytes, kind: str) -> Iterator[Place]:
    if kind == "blob":
        yield _place(data)
        return
    for number, _, payload in _scan(data):
        if number in _INNER[kind] and b"@model_path" in payload:
            yield from _places(payload, _INNER[kind][number])


def _place(reference: bytes) -> Place:
    offsets = [_varint(payload, 0)[0] for number, _, payload in _scan(reference) if number == 2]
    return _text(reference, 1), offsets[-1] if offsets else 0


def _frame(where: str, old: bytes, new: bytes, without: set[int], diff: Diff) -> None:
    one, other = _fields_without(old, without), _fields_without(new, without)
    if one != other:
        numbers = sorted({number for number, _, _ in set(one) ^ set(other)}) or ["order"]
        diff.outside.append(f"{where}: {', '.join(map(str, numbers))}")


def _fields_without(data: bytes, numbers: set[int]) -> list[tuple[int, bytes, bytes]]:
    return [each for each in _scan(data) if each[0] not in numbers]


def _all(data: bytes, number: int) -> list[bytes]:
    return [payload for found, _, payload in _scan(data) if found == number]


def _only(data: bytes, number: int) -> bytes:
    (payload,) = _all(data, number)
    return payload


def _text(data: bytes, number: int) -> str:
    found = _all(data, number)
    return found[-1].decode() if found else ""


def _scan(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(number, tag, payload) of each field; a payload is without its length."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        kind, mark = tag & 7, data[start:at]
        if kind == 0:
            _, end = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            end = at + size
        else:
            end = at + {1: 8, 5: 4}[kind]
        assert end <= len(data), f"field {tag >> 3} is cut short"
        yield tag >> 3, mark, data[at:end]
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
