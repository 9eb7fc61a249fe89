"""A pipeline edited as a file: its ML Programs as documents, the other parts unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..package import wire
from ..package.blobs import WeightFiles
from ..package.manifest import Layout
from ..package.members import Members, get_model_kind, replace_members
from ..package.weight_plan import DEAD_LIMIT
from ..utils.errors import InputError, suggest_nearest
from ..utils.option_spelling import format_option, format_option_values
from .description import Description
from .document import DESCRIPTION_FIELD, Document
from .program_parts import Function

__all__ = ["Pipeline"]


class Pipeline(Document):
    """The model file of a pipeline. Only names can be edited, as parts pass values to each other by name.

    `programs` are its ML Programs by the prefix of the names of their functions, such as `encoder/`.
    """

    def __init__(self, layout: Layout, raw: bytes, spec: Any, members: Members) -> None:
        # A pipeline has no program of its own, so `Document.__init__`, which reads one, is not called.
        self.layout, self.raw, self.where = layout, raw, str(layout.root)
        self.files, self.done, self.part, self.functions = WeightFiles(layout), [], "", {}
        self.repack, self.dead_limit, self.plan = False, DEAD_LIMIT, None
        self.gone: set[str] = set()
        self.version = self._original = int(spec.specificationVersion)
        self._spec, self._members = spec, members
        self.programs = {each.prefix: Document(layout, each.raw, each.spec) for each in members.programs}
        self.description = Description(b"".join(wire.get_payloads(raw, DESCRIPTION_FIELD)))

    def places(self, function: str | None) -> list[tuple[str, Document, Function]]:
        found = [(f"{prefix}{each.name}", program, each) for prefix, program in self.programs.items()
                 for each in program.functions.values()]
        names = [name for name, _, _ in found]
        if function is not None and function not in names:
            raise InputError(f"{self.where}: no function '{function}'; the parts have {', '.join(names)}"
                             f"{suggest_nearest(function, names)}")
        return [place for place in found if function in (None, place[0])]

    def check_names(self, names: Mapping[str, str], function: str | None) -> None:
        """Raise InputError for a rename that would break the connections between parts, before anything is renamed."""
        def who(old: str) -> str:
            return format_option_values("rename", f"{old}={names[old]}")

        ours = {each.path for each in self._members.programs}
        inside, outside = set(), _collect_interface_names(self._spec.description)
        for path, name, spec in _iterate_models(self._spec):
            if path in ours:
                inside |= _collect_interface_names(spec.description)
                continue
            for old in names.keys() & _collect_interface_names(spec.description):
                raise InputError(f"{who(old)}: part '{name}' of the pipeline takes or gives '{old}' "
                                 "and is no ML Program that could be edited too")
            outside |= _collect_interface_names(spec.description)
        for old, new in names.items():
            if function is not None and old in inside | outside:
                raise InputError(f"{who(old)}: '{old}' is what parts of the pipeline hand each other; "
                                 f"expected no {format_option('function')}, so that all of them get the new name")
            if new in (inside | outside) - names.keys():
                raise InputError(f"{who(old)}: the pipeline has a feature '{new}' already; expected a name "
                                 "that is free, or that is renamed too")

    def emit(self) -> bytes:
        parts = {each.path: self.programs[each.prefix].emit() for each in self._members.programs}
        raw = replace_members(self.raw, self._spec, parts)
        described = self.description.emit()
        return raw if described == b"".join(wire.get_payloads(raw, DESCRIPTION_FIELD)) else wire.replace_fields(
            raw, DESCRIPTION_FIELD, [described])


def _collect_interface_names(description: Any) -> set[str]:
    """Return the names of the inputs and outputs of a model and of its functions."""
    found = {each.name for each in (*description.input, *description.output)}
    return found.union(*(_collect_interface_names(each) for each in getattr(description, "functions", ())))


def _iterate_models(
    spec: Any, path: tuple[int, ...] = (), name: str = ""
) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """Yield path, name and message of all models in a pipeline, and of those in nested pipelines."""
    kind = get_model_kind(spec)
    if not kind.startswith("pipeline"):
        return
    inner = spec.pipeline if kind == "pipeline" else getattr(spec, kind).pipeline
    for place, model in enumerate(inner.models):
        called = inner.names[place] if place < len(inner.names) else str(place)
        yield (*path, place), f"{name}{called}", model
        yield from _iterate_models(model, (*path, place), f"{name}{called}/")
