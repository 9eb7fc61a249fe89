"""Removal of outputs, and of all ops that only these outputs needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coremltools.converters.mil.mil import Function

from ..package.interface import get_predicted_names
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from ..utils.text_format import format_count
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, find_unread_updates, remove_dead_ops
from .names import make_unknown_name_error

__all__ = ["DropOutput"]

_OPTION = "--drop-output"


@dataclass(frozen=True)
class DropOutput(Transform):
    """Removes outputs from each function that has them, or from `function`."""

    names: Sequence[str]
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Remove the outputs in place.

        Raises InputError for an unknown output, for a function's last output, and for a classifier's predictions.
        """
        functions = draft.select_functions(self.function)
        present = {var.name for function in functions.values() for var in function.outputs}
        for name in self.names:
            if name not in present:
                raise make_unknown_name_error(name, format_option_values("drop_output", name), present, "output",
                                              draft.gone)
        for name, function in functions.items():
            outputs = {var.name for var in function.outputs}
            dropped = [each for each in dict.fromkeys(self.names) if each in outputs]
            if dropped:
                _check_droppable(name, function, dropped)
                _drop_outputs(draft, name, function, dropped)
        return [draft]


def _check_droppable(name: str, function: Function, dropped: list[str]) -> None:
    if {var.name for var in function.outputs} <= set(dropped):
        raise InputError(
            f"{format_option_values('drop_output')}: function '{name}' would have no output left "
            f"({', '.join(dropped)}); expected at least one to stay"
        )
    for each in dropped:
        if each in get_predicted_names(function):
            raise InputError(f"{format_option_values('drop_output', each)}: '{each}' is a prediction of the classifier "
                             "and cannot be removed")


def _drop_outputs(draft: Draft, name: str, function: Function, dropped: list[str]) -> None:
    before = {*find_dead_ops(function), *find_unread_updates(function)}
    read_before = _find_read_inputs(function)
    function.set_outputs([var for var in function.outputs if var.name not in dropped])
    gone = remove_dead_ops(function, before)
    draft.gone |= dict.fromkeys([*dropped, *(var.name for op in gone for var in op.outputs)], "drop_output")
    draft.change_interface(name, *(InterfaceChange("output", each, None, "removed") for each in dropped))
    for each in dropped:
        draft.done.append(EditRecord(_OPTION, name, each, f"'{each}' is removed from the outputs"))
    ops = sum(op.op_type != "const" for op in gone)
    if gone:
        note = f"{format_count(ops, 'op')} and {len(gone) - ops} consts are removed, which nothing else needs"
        draft.done.append(EditRecord(_OPTION, name, "", note))
    for each in sorted(read_before - _find_read_inputs(function)):
        note = f"input '{each}' stays, but no op reads it"
        draft.done.append(EditRecord(_OPTION, name, each, note, changed=False))


def _find_read_inputs(function: Function) -> set[str]:
    """Return the inputs that ops read or that the function returns."""
    return {name for name, var in function.inputs.items() if var.child_ops or var.consuming_blocks}
