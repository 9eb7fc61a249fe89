"""Renaming of inputs, outputs, states and inner values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .contract import EditRecord
from .document import Document
from .names import check_identifier, make_unknown_name_error
from .pipeline import Pipeline
from .program_parts import Block, Function, Op

__all__ = ["Rename"]

_OPTION = "--rename"


@dataclass(frozen=True)
class Rename:
    """Renames values of each function that has them, or of `function` alone; all at once, so that names can be swapped.

    A name refers to all values of that name in a function: values in nested blocks may share one.
    """

    names: Mapping[str, str]
    function: str | None = None
    in_pipelines: ClassVar[bool] = True

    def apply(self, document: Document) -> list[Document]:
        """Rename in place. InputError for a name that is unknown, not free, or not accepted by Core ML."""
        for old, new in self.names.items():
            check_identifier(new, format_option_values("rename", f"{old}={new}"))
        places = document.places(self.function)
        present = {place: function.names() for place, _, function in places}
        for old, new in self.names.items():
            if not any(old in names for names in present.values()):
                raise make_unknown_name_error(
                    old,
                    format_option_values("rename", f"{old}={new}"),
                    set().union(*present.values()),
                    gone=document.gone,
                )
        if isinstance(document, Pipeline):
            document.check_names(self.names, self.function)
            document.description.model.rename(self.names)
        for place, program, function in places:
            names = {old: new for old, new in self.names.items() if old in present[place] and old != new}
            self._check_free(names, place, present[place])
            document.done += self._done(place, _classify_interface(function), present[place])
            _rename_values(program, function, names)
        return [document]

    @staticmethod
    def _check_free(names: Mapping[str, str], place: str, present: set[str]) -> None:
        taken = present - names.keys()
        for old, new in names.items():
            who = format_option_values("rename", f"{old}={new}")
            if new in taken:
                raise InputError(f"{who}: function '{place}' has a value '{new}' already; "
                                 "expected a name that is free, or that is renamed too")
            taken.add(new)

    def _done(self, place: str, kinds: Mapping[str, str], present: set[str]) -> list[EditRecord]:
        return [
            EditRecord(_OPTION, place, new, f"{kinds.get(old, 'value')} '{old}' is called '{new}'")
            if old != new
            else EditRecord(_OPTION, place, old, f"'{old}' is called so already", changed=False)
            for old, new in self.names.items()
            if old in present
        ]


def _rename_values(document: Document, function: Function, names: Mapping[str, str]) -> None:
    if not names:
        return
    marks = re.compile(b"|".join(re.escape(old.encode()) for old in names))
    function.inputs = [each.named(names.get(each.name, each.name)) for each in function.inputs]
    _rename_in_block(function.block, names, marks)
    for section in document.description.of(function.name):
        section.rename(names)


def _rename_in_block(block: Block, names: Mapping[str, str], marks: re.Pattern[bytes]) -> None:
    block.inputs = [each.named(names.get(each.name, each.name)) for each in block.inputs]
    block.outputs = [names.get(name, name) for name in block.outputs]
    block.ops = [_rename_in_op(op, names, marks) if marks.search(op.data) else op for op in block.ops]


def _rename_in_op(op: Op, names: Mapping[str, str], marks: re.Pattern[bytes]) -> Op:
    op = op.with_arguments(names).with_outputs(names)
    blocks = op.blocks
    for block in blocks:
        _rename_in_block(block, names, marks)
    return op.with_blocks(blocks) if blocks else op


def _classify_interface(function: Function) -> dict[str, str]:
    """Return the kind ("input", "output" or "state") of each interface value."""
    found = dict.fromkeys(function.block.outputs, "output")
    found |= {each.name: "state" if each.message.type.HasField("stateType") else "input" for each in function.inputs}
    return found
