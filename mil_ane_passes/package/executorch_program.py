"""ExecuTorch programs (.pte): finding and replacing the blobs of their Core ML delegates.

A program is a flatbuffer followed by segments. When a blob is replaced, only the sizes and offsets of segments change:
methods, names, compile specs, debug handles, constants and the blobs of other backends stay byte for byte, and each
segment keeps its alignment. A delegate is named `METHOD/N`, where N is its number in the method; its path is
`model.pte/METHOD/N`. A blob that several delegates share has the name of the first.
Source of the format: `schema/program.fbs` and `exir/_serialize/_program.py` of https://github.com/pytorch/executorch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any

from ..utils.errors import InputError, suggest_nearest
from .executorch_blob import COMPILED_MODEL, MODEL, Data, Folder, count_bytes, read_folder
from .files import get_file_stamp

__all__ = ["SUFFIX", "Blob", "ExecutorchProgram", "find_address", "find_read_file", "is_program_path",
           "refuse_program"]

SUFFIX = ".pte"
_BACKEND = "CoreMLBackend"
_REFERENCE = b"CMJR"
"Marks the blob of a delegate whose model is in the named data; JSON with its `key` and `functionName` follows."
# A reference is JSON with two short texts; a damaged program may claim any size, and the limit bounds what is parsed.
_MAX_REFERENCE_BYTES = 1 << 16
_IDENTIFIER = re.compile(rb"ET\d\d")
_HEADER = struct.Struct("<4sIQQQ")
"The header after the identifier: magic, length of the header, size of the flatbuffer, start and size of the segments."
_HEADER_AT, _HEADER_MAGIC, _SHORT_HEADER = 8, b"eh00", 24
_MAX_ALIGNMENT = 1 << 16
"Largest alignment of a segment, in bytes, that is kept: 64 KB, the largest memory page that systems use by default."

# Slots of fields in the tables of the schema, which never change: fields are only ever added.
_PROGRAM_PLANS, _PROGRAM_INLINE_DATA, _PROGRAM_SEGMENTS, _PROGRAM_NAMED_DATA = 6, 10, 12, 18
_PLAN_NAME, _PLAN_DELEGATES = 4, 18
_DELEGATE_ID, _DELEGATE_DATA = 4, 6
_REFERENCE_LOCATION, _REFERENCE_INDEX = 4, 6
_INLINE_DATA = 4
_SEGMENT_OFFSET, _SEGMENT_SIZE = 4, 6
_NAMED_KEY, _NAMED_SEGMENT = 4, 6
_IN_SEGMENT = 1


def is_program_path(path: Any) -> bool:
    """Return whether `path` is that of an ExecuTorch program, which need not exist."""
    return isinstance(path, (str, os.PathLike)) and Path(path).suffix == SUFFIX


def find_address(path: Any) -> tuple[Path, str | None] | None:
    """Split the path of a delegate or program into the program's path and the delegate's name (None for a program).

    Returns None if the path is neither a program nor a delegate in one.
    """
    if not isinstance(path, (str, os.PathLike)):
        return None
    found = Path(path)
    if found.suffix == SUFFIX and found.is_file():
        return found, None
    file = next((each for each in found.parents if each.suffix == SUFFIX and each.is_file()), None)
    return None if file is None else (file, found.relative_to(file).as_posix())


def find_read_file(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file or folder that is read for the model at `path`: a delegate's program, else `path` itself."""
    address = find_address(path)
    return path if address is None else address[0]


def refuse_program(path: str | os.PathLike[str]) -> None:
    """Raise InputError if `path` is an ExecuTorch program or a delegate: a package or a network is expected."""
    address = find_address(path)
    if address is not None:
        kind = "an ExecuTorch program" if address[1] is None else "part of an ExecuTorch program"
        raise InputError(f"{os.fspath(path)}: is {kind}, which is not supported here; expected a package: "
                         "mil-ane-passes rewrite IN.pte/METHOD/N -o OUT.mlpackage writes the one of a delegate")


@dataclass(frozen=True)
class Blob:
    """The blob of one or several Core ML delegates: its position in the file, and its folder.

    `users` maps each delegate to the function of the model that it calls ("" for the default function). If the blob is
    in the flatbuffer, `pointer` is the position of the offset that leads to it; None otherwise.
    """

    name: str
    users: Mapping[str, str]
    start: int
    size: int
    pointer: int | None
    root: str
    folder: Folder


@dataclass(frozen=True)
class _Segment:
    """A segment: its start and size in the file, and the positions of these two numbers (0 for one that is omitted)."""

    start: int
    size: int
    offset_at: int
    size_at: int


class _Table:
    """A table of the flatbuffer, read with `flatbuffers`."""

    def __init__(self, data: memoryview, position: int) -> None:
        from flatbuffers import number_types, table

        self._data, self._types, self._table = data, number_types, table.Table(data, position)

    def find_field(self, slot: int) -> int:
        """Return the position of a field; 0 if it is omitted because it has its default value."""
        offset = self._table.Offset(slot)
        return int(offset and self._table.Pos + offset)

    def read_number(self, slot: int, kind: str) -> int:
        at = self.find_field(slot)
        return int(self._table.Get(getattr(self._types, f"{kind}Flags"), at)) if at else 0

    def read_text(self, slot: int) -> str:
        at = self.find_field(slot)
        return str(self._table.String(at).decode()) if at else ""

    def read_table(self, slot: int) -> _Table:
        at = self.find_field(slot)
        if not at:
            raise ValueError("a table is missing")
        return _Table(self._data, self._table.Indirect(at))

    def find_vector(self, slot: int) -> tuple[int, int]:
        """Return the start and the length of a vector."""
        if not self.find_field(slot):
            return 0, 0
        offset = self._table.Offset(slot)
        return int(self._table.Vector(offset)), int(self._table.VectorLen(offset))

    def read_tables(self, slot: int) -> list[_Table]:
        start, length = self.find_vector(slot)
        if start + 4 * length > len(self._data):
            raise ValueError("a list is longer than the file")
        return [_Table(self._data, self._table.Indirect(start + 4 * place)) for place in range(length)]


class ExecutorchProgram:
    """A program on disk, mapped: the blobs of its Core ML delegates, by name, and the backends of all other delegates.

    Raises InputError for a file that is not a program, and for an inconsistent program.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from ..utils.mapped_files import map_file  # imports numpy, which would delay `--help`

        self.path = Path(path)
        try:
            self._file = FileIO(self.path)
            found = os.fstat(self._file.fileno())
            self._stamp = get_file_stamp(found)
            self._data = map_file(self._file, self.path).data if found.st_size else memoryview(b"")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from error
        if not _IDENTIFIER.fullmatch(bytes(self._data[4:8])):
            raise InputError(f"{self.path}: is not an ExecuTorch program (bytes 4 to 8 are "
                             f"{bytes(self._data[4:8])!r}); expected a .pte written by `to_executorch`")
        self.blobs: dict[str, Blob] = {}
        self.others: dict[str, str] = {}
        with self._convert_errors():
            self._read_header()
            self._read_program()

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of reading into an InputError."""
        try:
            yield
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "flatbuffers":
                raise
            raise InputError(f"{self.path}: reading ExecuTorch programs needs the package flatbuffers, which is not "
                             f"installed: pip install 'mil-ane-passes[executorch]'") from error
        except InputError:
            raise
        except (ValueError, TypeError, IndexError, OverflowError, struct.error) as error:
            self.check_unchanged()
            raise InputError(f"{self.path}: is damaged ({error}); use a fresh copy of the program, or export it "
                             f"again") from error

    def _read_header(self) -> None:
        """Find the end of the flatbuffer and the start of the segments; without a header, all bytes are flatbuffer."""
        self._program_end = self._base = len(self._data)
        self._has_header = bytes(self._data[_HEADER_AT:_HEADER_AT + 4]) == _HEADER_MAGIC
        if self._has_header:
            _, length, end, base, _ = _HEADER.unpack_from(self._data, _HEADER_AT)
            if length < _SHORT_HEADER or not end <= (base or end) <= len(self._data):
                raise ValueError(f"its header gives {end} bytes of program and segments from {base} on; it has "
                                 f"{len(self._data)} bytes")
            self._program_end, self._base = end, base or end

    def _read_program(self) -> None:
        program = self._data[:self._program_end]
        root = _Table(program, int.from_bytes(program[:4], "little"))
        self._segments = [self._read_segment(each) for each in root.read_tables(_PROGRAM_SEGMENTS)]
        inline = root.read_tables(_PROGRAM_INLINE_DATA)
        named = {each.read_text(_NAMED_KEY): each.read_number(_NAMED_SEGMENT, "Uint32")
                 for each in root.read_tables(_PROGRAM_NAMED_DATA)}
        users: dict[tuple[int, int, int | None], dict[str, str]] = {}
        for plan in root.read_tables(_PROGRAM_PLANS):
            for place, delegate in enumerate(plan.read_tables(_PLAN_DELEGATES)):
                name, backend = f"{plan.read_text(_PLAN_NAME)}/{place}", delegate.read_text(_DELEGATE_ID)
                if backend != _BACKEND:
                    self.others[name] = backend
                    continue
                start, size, pointer, function = self._find_data(name, delegate, inline, named)
                users.setdefault((start, size, pointer), {})[name] = function
        for (start, size, pointer), calls in users.items():
            self.blobs[next(iter(calls))] = self._read_blob(start, size, pointer, calls)

    def _read_segment(self, table: _Table) -> _Segment:
        start = self._base + table.read_number(_SEGMENT_OFFSET, "Uint64")
        size = table.read_number(_SEGMENT_SIZE, "Uint64")
        if start + size > len(self._data):
            raise ValueError(f"a segment ends at {start + size}, and the file has {len(self._data)} bytes")
        return _Segment(start, size, table.find_field(_SEGMENT_OFFSET), table.find_field(_SEGMENT_SIZE))

    def _find_data(
        self, name: str, delegate: _Table, inline: Sequence[_Table], named: Mapping[str, int]
    ) -> tuple[int, int, int | None, str]:
        """Return start, size and pointer (in the flatbuffer) of a delegate's model, and the function that it calls."""
        data = delegate.read_table(_DELEGATE_DATA)
        index = data.read_number(_REFERENCE_INDEX, "Uint32")
        pointer = None
        if data.read_number(_REFERENCE_LOCATION, "Int8") == _IN_SEGMENT:
            start, size = self._segments[index].start, self._segments[index].size
        else:
            pointer = inline[index].find_field(_INLINE_DATA)
            start, size = inline[index].find_vector(_INLINE_DATA)
            if start + size > self._program_end:
                raise ValueError(f"the data of {name} end after the program")
        if bytes(self._data[start:start + 4]) != _REFERENCE:
            return start, size, pointer, ""
        reference = json.loads(bytes(self._data[start + 4:start + min(size, _MAX_REFERENCE_BYTES)]))
        key = reference.get("key") if isinstance(reference, dict) else None
        if not isinstance(key, str) or key not in named:
            raise InputError(f"{self.path}: the model of {name} is named '{key}', which is not in this file; expected "
                             f"a program that contains its data (not in a .ptd file)")
        segment, function = self._segments[named[key]], reference.get("functionName", "")
        return segment.start, segment.size, None, function if isinstance(function, str) else ""

    def _read_blob(self, start: int, size: int, pointer: int | None, users: Mapping[str, str]) -> Blob:
        name = next(iter(users))
        try:
            root, folder = read_folder(self._data[start:start + size])
        except ValueError as error:
            raise ValueError(f"the model of {name}: {error}") from error
        return Blob(name, users, start, size, pointer, root, folder)

    def select_blobs(self, name: str | None) -> list[Blob]:
        """Return the blob of the delegate `name`, or all blobs if it is None.

        Raises InputError if it does not exist, or contains a compiled model.
        """
        if not self.blobs:
            others = ", ".join(f"{delegate} is of {backend}" for delegate, backend in self.others.items())
            raise InputError(f"{self.path}: no Core ML delegate ({others or 'it has no delegates'}); expected a "
                             "program lowered with CoreMLPartitioner")
        found = [blob for blob in self.blobs.values() if name is None or name in blob.users]
        if not found:
            known = [each for blob in self.blobs.values() for each in blob.users]
            raise InputError(f"{self.path}: no Core ML delegate '{name}'; expected {' or '.join(known)}"
                             f"{suggest_nearest(str(name), known)}")
        for blob in found:
            if COMPILED_MODEL in blob.folder:
                raise InputError(f"{self.path}/{blob.name}: contains a compiled model ({COMPILED_MODEL}), which is "
                                 f"not supported; lower it with CoreMLBackend.MODEL_TYPE.MODEL")
            if not isinstance(blob.folder.get(MODEL), dict):
                raise InputError(f"{self.path}/{blob.name}: contains no {MODEL}; expected a delegate written by "
                                 f"ExecuTorch's Core ML backend")
        return found

    def select_only(self, name: str | None) -> Blob:
        """Return the blob of the delegate `name`; if it is None, the only blob.

        Raises InputError as `select` does, and if `name` is None but the program has several blobs.
        """
        found = self.select_blobs(name)
        if len(found) > 1:
            raise InputError(f"{self.path}: has {len(found)} models; choose one of them: "
                             f"{', '.join(f'{self.path}/{blob.name}' for blob in found)}")
        return found[0]

    def check_unchanged(self) -> None:
        """Raise InputError when the file has changed since it was opened."""
        try:
            same = get_file_stamp(self.path.stat()) == self._stamp
        except OSError:
            same = False
        if not same:
            raise InputError(f"{self.path}: was modified while it was read; run again when no other process writes to "
                             f"it")

    def write(self, blobs: Mapping[str, Sequence[Data]], file: IO[bytes]) -> None:
        """Write the program to `file` with the blobs of these names replaced by the given parts.

        Raises InputError if the file has data between its segments that no segment lists: they could not be kept.
        """
        try:
            for part in self._lay_out(blobs) if blobs else [self._data]:
                if isinstance(part, Path):
                    with open(part, "rb") as source:
                        shutil.copyfileobj(source, file, 1 << 20)
                else:
                    file.write(part)
        except OSError:
            self.check_unchanged()  # writing from a mapping fails if the file has become shorter
            raise
        self.check_unchanged()

    def _lay_out(self, blobs: Mapping[str, Sequence[Data]]) -> list[Data]:
        """Return the parts of the new file."""
        program = bytearray(self._data[:self._program_end])
        new: dict[tuple[int, int], Sequence[Data]] = {}
        for name, contents in blobs.items():
            blob = self.blobs[name]
            if blob.pointer is None:
                new[blob.start, blob.size] = contents
            else:
                _replace_inline_data(program, blob, contents)
        base = _align_position(len(program), self._base) if len(program) != self._program_end else self._base
        parts: list[Data] = [bytes(base - len(program))]
        end, old_end = base, self._base
        for start, size in sorted({(each.start, each.size) for each in self._segments if each.size}):
            if start < old_end or any(self._data[old_end:start]):
                raise InputError(f"{self.path}: its segments overlap, or there is unlisted data between them; "
                                 f"expected a program written by `to_executorch`")
            at = start if end == old_end else _align_position(end, start)
            content = new.get((start, size), [self._data[start:start + size]])
            parts += [bytes(at - end), *content]
            length = sum(map(count_bytes, content))
            self._set_place(program, start, size, at - base, length)
            end, old_end = at + length, start + size
        if any(self._data[old_end:]):
            raise InputError(f"{self.path}: there is unlisted data after its segments; expected a program written by "
                             f"`to_executorch`")
        if self._has_header:
            _, length, _, old_base, _ = _HEADER.unpack_from(program, _HEADER_AT)
            sizes = (len(program), base if old_base else 0, end - base)
            struct.pack_into("<QQQ" if length > _SHORT_HEADER else "<QQ", program, _HEADER_AT + 8,
                             *sizes[:3 if length > _SHORT_HEADER else 2])
        return [bytes(program), *parts]

    def _set_place(self, program: bytearray, start: int, size: int, offset: int, length: int) -> None:
        """Set the offset and size of all segments that were at `start` with `size` bytes."""
        for each in self._segments:
            if (each.start, each.size) == (start, size):
                for at, number in ((each.offset_at, offset), (each.size_at, length)):
                    if at:
                        struct.pack_into("<Q", program, at, number)


def _replace_inline_data(program: bytearray, blob: Blob, contents: Sequence[Data]) -> None:
    """Replace a blob in the flatbuffer, in place if it fits there, else at the end; unused old bytes are zeroed."""
    assert blob.pointer is not None
    data = b"".join(each.read_bytes() if isinstance(each, Path) else bytes(each) for each in contents)
    program[blob.start:blob.start + blob.size] = bytes(blob.size)
    start = blob.start
    if len(data) > blob.size:
        start = _align_position(len(program) + 4, blob.start)  # four bytes of length precede the data
        program += bytes(start + len(data) - len(program))
        struct.pack_into("<I", program, blob.pointer, start - 4 - blob.pointer)
    struct.pack_into("<I", program, start - 4, len(data))
    program[start:start + len(data)] = data


def _align_position(position: int, like: int) -> int:
    """Return the first position at or after `position` that is aligned as the position `like` is."""
    alignment = min(like & -like, _MAX_ALIGNMENT) or 1
    return -(-position // alignment) * alignment
