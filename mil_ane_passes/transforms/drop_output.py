"""Removal of outputs, with all ops that only they needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from ..utils.text_format import format_count
from .contract import EditRecord
from .document import Document
from .names import make_unknown_name_error
from .program_parts import Function
from .uses import find_dead_ops, get_read_names, remove_dead_ops

__all__ = ["DropOutput"]

_OPTION = "--drop-output"


@dataclass(frozen=True)
class DropOutput:
    """Removes outputs from each function that has them, or from `function`."""

    names: Sequence[str]
    function: str | None = None

    def apply(self, document: Document) -> list[Document]:
        """Drop in place.

        Raises InputError for an unknown output, for a function's last one, and for a classifier's predictions.
        """
        functions = document.chosen(self.function)
        present = {name for function in functions for name in function.block.outputs}
        for name in self.names:
            if name not in present:
                raise make_unknown_name_error(name, format_option_values("drop_output", name), present, "output")
        for function in functions:
            dropped = [name for name in dict.fromkeys(self.names) if name in function.block.outputs]
            if dropped:
                self._check(document, function, dropped)
                _drop_outputs(document, function, dropped)
        return [document]

    @staticmethod
    def _check(document: Document, function: Function, dropped: list[str]) -> None:
        if set(function.block.outputs) <= set(dropped):
            raise InputError(
                f"{format_option_values('drop_output')}: function '{function.name}' would have no output left "
                f"({', '.join(dropped)}); expected at least one to stay"
            )
        for section in document.description.of(function.name):
            for name in dropped:
                who = format_option_values("drop_output", name)
                if name in section.predicted:
                    raise InputError(f"{who}: '{name}' is what the classifier predicts by; it has to stay")


def _drop_outputs(document: Document, function: Function, dropped: list[str]) -> None:
    before = find_dead_ops(function.block)
    read_before = _find_read_inputs(function)
    function.block.outputs = [name for name in function.block.outputs if name not in dropped]
    gone = remove_dead_ops(function.block, before)
    document.gone |= {*dropped, *(name for op in gone for name in op.outputs)}
    document.repack = document.repack or bool(gone)
    for section in document.description.of(function.name):
        section.put("output", [each for each in section.features("output") if each.name not in dropped])
    for name in dropped:
        document.done.append(EditRecord(_OPTION, function.name, name, f"'{name}' is no output any more"))
    ops = sum(op.type != "const" for op in gone)
    if gone:
        note = f"{format_count(ops, 'op')} and {len(gone) - ops} consts are gone that nothing else needed"
        document.done.append(EditRecord(_OPTION, function.name, "", note))
    for name in sorted(read_before - _find_read_inputs(function)):
        note = f"input '{name}' stays; nothing reads it any more"
        document.done.append(EditRecord(_OPTION, function.name, name, note, changed=False))


def _find_read_inputs(function: Function) -> set[str]:
    """Return the inputs that ops read or that are returned."""
    read = set(function.block.outputs).union(*map(get_read_names, function.block.ops))
    return read & {declared.name for declared in function.inputs}
