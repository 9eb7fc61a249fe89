"""Outputs taken away, with all that only they needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import InputError
from ..core.spelling import asked
from ..core.words import counted
from .contract import Done
from .document import Document
from .names import unknown
from .parts import Function
from .uses import dead_ops, drop_dead, reads

__all__ = ["DropOutput"]

_OPTION = "--drop-output"


@dataclass(frozen=True)
class DropOutput:
    """Takes outputs away from each function that has them, or from `function`."""

    names: Sequence[str]
    function: str | None = None

    def apply(self, document: Document) -> list[Document]:
        """Drop in place. InputError for a name that is no output, for a function's last, and for what is predicted."""
        functions = document.chosen(self.function)
        present = {name for function in functions for name in function.block.outputs}
        for name in self.names:
            if name not in present:
                raise unknown(name, asked("drop_output", name), present, "output")
        for function in functions:
            dropped = [name for name in dict.fromkeys(self.names) if name in function.block.outputs]
            if dropped:
                self._check(document, function, dropped)
                _drop(document, function, dropped)
        return [document]

    @staticmethod
    def _check(document: Document, function: Function, dropped: list[str]) -> None:
        if set(function.block.outputs) <= set(dropped):
            raise InputError(f"{asked('drop_output')}: function '{function.name}' would have no output left "
                             f"({', '.join(dropped)}); expected at least one to stay")
        for section in document.description.of(function.name):
            for name in dropped:
                who = asked("drop_output", name)
                if name in section.predicted:
                    raise InputError(f"{who}: '{name}' is what the classifier predicts by; it has to stay")


def _drop(document: Document, function: Function, dropped: list[str]) -> None:
    before = dead_ops(function.block)
    read_before = _read(function)
    function.block.outputs = [name for name in function.block.outputs if name not in dropped]
    gone = drop_dead(function.block, before)
    document.gone |= {*dropped, *(name for op in gone for name in op.outputs)}
    document.repack = document.repack or bool(gone)
    for section in document.description.of(function.name):
        section.put("output", [each for each in section.features("output") if each.name not in dropped])
    for name in dropped:
        document.done.append(Done(_OPTION, function.name, name, f"'{name}' is no output any more"))
    ops = sum(op.type != "const" for op in gone)
    if gone:
        note = f"{counted(ops, 'op')} and {len(gone) - ops} consts are gone that nothing else needed"
        document.done.append(Done(_OPTION, function.name, "", note))
    for name in sorted(read_before - _read(function)):
        note = f"input '{name}' stays; nothing reads it any more"
        document.done.append(Done(_OPTION, function.name, name, note, changed=False))


def _read(function: Function) -> set[str]:
    """The inputs that ops read or that are returned."""
    read = set(function.block.outputs).union(*map(reads, function.block.ops))
    return read & {declared.name for declared in function.inputs}
