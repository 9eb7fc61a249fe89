"""A package that is edited as a file: its model in pieces, its weights where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremltools import proto

from ..core.errors import InputError, nearest
from ..package import wire
from ..package.blobs import WeightFiles
from ..package.manifest import Layout
from ..package.plan import DEAD_LIMIT, WeightPlan
from ..package.refs import find_refs
from .contract import Done
from .description import Description
from .parts import Function

__all__ = ["DESCRIPTION", "Document"]

_VERSION, DESCRIPTION, _ML_PROGRAM, _FUNCTIONS = 1, 2, 502, 2


class Document:
    """A model file in pieces to edit.

    `functions` are by name in file order: add, remove and edit them. `description` is what the model says of their
    inputs and outputs. `version` is the specification version. `done` lists what the edits did. An edit that takes the
    last use of a weight away sets `repack`: then the blobs nothing refers to are dropped when the document is written,
    from each weight file of which they are more than the part `dead_limit`. `plan` holds the new weights, if any.
    `part` is empty, or tells the documents apart that one became. `gone` are the names of what an edit took away.
    """

    def __init__(self, layout: Layout, raw: bytes, spec: Any) -> None:
        self.layout, self.raw = layout, raw
        self.files = WeightFiles(layout)
        self.where = str(layout.root)
        self.version = self._then = int(spec.specificationVersion)
        self.done: list[Done] = []
        self.repack, self.dead_limit = False, DEAD_LIMIT
        self.plan: WeightPlan | None = None
        self.part = ""
        self.gone: set[str] = set()
        programs = wire.payloads(raw, _ML_PROGRAM)
        self._entries = {wire.entry_key(e): e for p in programs for e in wire.payloads(p, _FUNCTIONS)}
        if len(programs) != 1 or len(self._entries) != len(wire.payloads(programs[0], _FUNCTIONS)):
            raise InputError(f"{self.where}: the model file has {len(programs)} programs, or two functions of one "
                             "name; expected one with distinct names; the package is damaged: take a fresh copy")
        self.functions = {name: Function(name, wire.entry_value(entry), self.where)
                          for name, entry in self._entries.items()}
        self.description = Description(b"".join(wire.payloads(raw, DESCRIPTION)))

    def chosen(self, function: str | None) -> list[Function]:
        """The functions to edit: those made of `function` of the source, or all. InputError when it is none."""
        sources = [each.source for each in self.functions.values()]
        if function is not None and function not in sources:
            raise InputError(f"{self.where}: no function '{function}'; the model has {_listed(sources)}"
                             f"{nearest(function, sources)}")
        return [each for each in self.functions.values() if function in (None, each.source)]

    def places(self, function: str | None) -> list[tuple[str, Document, Function]]:
        """The functions as `chosen` gives them, each with what a report calls it and the document it is in."""
        return [(each.name, self, each) for each in self.chosen(function)]

    def again(self, raw: bytes, part: str = "") -> Document:
        """A document of the model file `raw` in this one's place: of the same package, after the same edits."""
        made = Document(self.layout, raw, proto.Model_pb2.Model(specificationVersion=self.version))
        made.files, made.part, made.done = self.files, part or self.part, list(self.done)
        made.repack, made.dead_limit, made.plan, made.gone = self.repack, self.dead_limit, self.plan, self.gone
        for name, function in made.functions.items():
            function.source = self.functions[name].source
        return made

    def stored(self, raw: bytes) -> set[tuple[str, int]]:
        """The places of weights that the model file `raw` of this document refers to and that are in a file by now."""
        new = {(self.plan.target, blob.offset) for blob in self.plan.added} if self.plan is not None else set()
        return {ref for ref in find_refs(raw) if ref not in new}

    def emit(self) -> bytes:
        """The model file as it is now; byte for byte that of the source when nothing was changed."""
        entries = [self._entry(each) for each in self.functions.values()]
        program = wire.replace(wire.payloads(self.raw, _ML_PROGRAM)[0], _FUNCTIONS, entries)
        described = self.description.emit()
        raw = wire.replace(self.raw, _ML_PROGRAM, [program])
        if described != b"".join(wire.payloads(self.raw, DESCRIPTION)):
            raw = wire.replace(raw, DESCRIPTION, [described])
        return raw if self.version == self._then else _with_version(raw, self.version)

    def _entry(self, function: Function) -> bytes:
        made = function.emit()
        old = self._entries.get(function.name)
        return wire.entry(function.name, made) if old is None else wire.replace(old, wire.VALUE, [made])


def _with_version(raw: bytes, version: int) -> bytes:
    number = wire.varint(_VERSION << 3 | wire.VARINT) + wire.varint(version)
    return number + b"".join(raw[f.start : f.end] for f in wire.fields(raw) if f.number != _VERSION)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
