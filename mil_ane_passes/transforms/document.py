"""A package edited as a file: its model in pieces, its weights left in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremltools import proto

from ..package import wire
from ..package.blob_refs import find_refs
from ..package.blobs import WeightFiles
from ..package.manifest import Layout
from ..package.weight_plan import DEAD_LIMIT, WeightPlan
from ..utils.errors import InputError, suggest_nearest
from .contract import EditRecord
from .description import Description
from .program_parts import Function

__all__ = ["DESCRIPTION_FIELD", "Document"]

_VERSION_FIELD, DESCRIPTION_FIELD, _ML_PROGRAM_FIELD, _FUNCTIONS_FIELD = 1, 2, 502, 2


class Document:
    """A model file in pieces to edit.

    `functions` are by name in file order: add, remove and edit them. `description` describes their inputs and outputs.
    `version` is the specification version. `done` lists the actions of the edits. An edit that removes the last use of
    a weight sets `repack`: then unreferenced blobs are dropped when the document is written, from each weight file of
    which they are more than the part `dead_limit`. `plan` holds the new weights, if any. `part` is empty, or
    distinguishes the documents that one became. `gone` are the names of removed values.
    """

    def __init__(self, layout: Layout, raw: bytes, spec: Any) -> None:
        self.layout, self.raw = layout, raw
        self.files = WeightFiles(layout)
        self.where = str(layout.root)
        self.version = self._original = int(spec.specificationVersion)
        self.done: list[EditRecord] = []
        self.repack, self.dead_limit = False, DEAD_LIMIT
        self.plan: WeightPlan | None = None
        self.part = ""
        self.gone: set[str] = set()
        programs = wire.get_payloads(raw, _ML_PROGRAM_FIELD)
        self._entries = {wire.get_entry_key(e): e for p in programs for e in wire.get_payloads(p, _FUNCTIONS_FIELD)}
        if len(programs) != 1 or len(self._entries) != len(wire.get_payloads(programs[0], _FUNCTIONS_FIELD)):
            raise InputError(f"{self.where}: the model file has {len(programs)} programs, or two functions of one "
                             "name; expected one with distinct names; the package is damaged: take a fresh copy")
        self.functions = {name: Function(name, wire.get_entry_value(entry), self.where)
                          for name, entry in self._entries.items()}
        self.description = Description(b"".join(wire.get_payloads(raw, DESCRIPTION_FIELD)))

    def chosen(self, function: str | None) -> list[Function]:
        """Return the functions to edit: those made of `function` of the source, or all.

        Raises InputError for an unknown function.
        """
        sources = [each.source for each in self.functions.values()]
        if function is not None and function not in sources:
            raise InputError(f"{self.where}: no function '{function}'; the model has {_format_names(sources)}"
                             f"{suggest_nearest(function, sources)}")
        return [each for each in self.functions.values() if function in (None, each.source)]

    def places(self, function: str | None) -> list[tuple[str, Document, Function]]:
        """Return the functions of `chosen`, each with its name in reports and its document."""
        return [(each.name, self, each) for each in self.chosen(function)]

    def again(self, raw: bytes, part: str = "") -> Document:
        """Return a document of the model file `raw` that replaces this one: same package, after the same edits."""
        made = Document(self.layout, raw, proto.Model_pb2.Model(specificationVersion=self.version))
        made.files, made.part, made.done = self.files, part or self.part, list(self.done)
        made.repack, made.dead_limit, made.plan, made.gone = self.repack, self.dead_limit, self.plan, self.gone
        for name, function in made.functions.items():
            function.source = self.functions[name].source
        return made

    def stored(self, raw: bytes) -> set[tuple[str, int]]:
        """Return the blobs that the model file `raw` of this document refers to, without new ones not yet in a file."""
        new = {(self.plan.target, blob.offset) for blob in self.plan.added} if self.plan is not None else set()
        return {ref for ref in find_refs(raw) if ref not in new}

    def emit(self) -> bytes:
        """Return the current model file; byte for byte that of the source when nothing was changed."""
        entries = [self._entry(each) for each in self.functions.values()]
        program = wire.replace_fields(wire.get_payloads(self.raw, _ML_PROGRAM_FIELD)[0], _FUNCTIONS_FIELD, entries)
        described = self.description.emit()
        raw = wire.replace_fields(self.raw, _ML_PROGRAM_FIELD, [program])
        if described != b"".join(wire.get_payloads(self.raw, DESCRIPTION_FIELD)):
            raw = wire.replace_fields(raw, DESCRIPTION_FIELD, [described])
        return raw if self.version == self._original else _replace_version(raw, self.version)

    def _entry(self, function: Function) -> bytes:
        made = function.emit()
        old = self._entries.get(function.name)
        return wire.encode_entry(function.name, made) if old is None else wire.replace_fields(old, wire.VALUE, [made])


def _replace_version(raw: bytes, version: int) -> bytes:
    number = wire.encode_varint(_VERSION_FIELD << 3 | wire.VARINT) + wire.encode_varint(version)
    return number + b"".join(raw[f.start : f.end] for f in wire.iterate_fields(raw) if f.number != _VERSION_FIELD)


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
