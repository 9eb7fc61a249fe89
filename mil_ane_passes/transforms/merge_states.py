"""`--merge-states`: several states become one of rank 4, which is read once and written once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Var, types
from coremltools.converters.mil.mil.program import StateTensorPlaceholder

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.coremltools_internals import add_function_input, remove_function_input
from ..ir.query import get_consumers, get_static_shape
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, find_unread_updates, remove_dead_ops
from .names import check_identifier
from .state_flow import find_state_obstacle, forward_stores, get_window, join_stores, thread_state

__all__ = ["MergeStates", "find_channels"]

_OPTION = "--merge-states"


@dataclass(frozen=True)
class _Place:
    """The position of a state in the merged one: channels [begin, end)."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class MergeStates(Transform):
    """Merges all states of each function, or of `function`, into the state `name` of shape (1, channels, rows, width).

    The last two axes of the states must be equal; all other axes become channels. A single state becomes one of rank 4.
    """

    name: str
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Merge in place. Raises InputError for a function without states, and for states of unequal last two axes."""
        check_identifier(self.name, format_option_values("merge_states", self.name))
        functions = {name: function for name, function in draft.select_functions(self.function).items()
                     if any(types.is_state(var.sym_type) for var in function.inputs.values())}
        if not functions:
            raise self._make_error("the model has no states")
        for name, function in functions.items():
            _Merge(self, draft, name, function).apply()
        return [draft]

    def _make_error(self, words: str) -> InputError:
        return InputError(f"{format_option_values('merge_states', self.name)}: {words}")


class _Merge:
    """The change of one function."""

    def __init__(self, requested: MergeStates, draft: Draft, name: str, function: Function) -> None:
        self._new, self._draft, self._name, self._function = requested.name, draft, name, function
        self._error = requested._make_error
        states = [each for each, var in function.inputs.items() if types.is_state(var.sym_type)]
        ends = {*function.inputs, *(var.name for var in function.outputs)} - set(states)
        if self._new in ends:
            raise self._error(f"'{self._new}' is an input or output already; expected a free name")
        self._places = self._place(states)

    def _place(self, states: Sequence[str]) -> list[_Place]:
        """Assign channels to each state. Raises InputError for states that cannot be merged."""
        places: list[_Place] = []
        for each in states:
            var = self._function.inputs[each]
            shape = get_static_shape(var)
            obstacle = find_state_obstacle(self._function, each)
            if obstacle:
                raise self._error(f"the state '{each}' cannot be merged: {obstacle}")
            if shape is None or len(shape) < 3:
                found = "no fixed shape" if shape is None else f"rank {len(shape)}"
                raise self._error(f"the state '{each}' has {found}; expected a fixed shape of rank 3 or more")
            begin = places[-1].end if places else 0
            places.append(_Place(each, shape, begin, begin + math.prod(shape[:-2])))
            first = self._function.inputs[states[0]]
            if shape[-2:] != places[0].shape[-2:] or var.dtype != first.dtype:
                raise self._error(f"'{states[0]}' is {types.builtin_to_string(first.dtype)} with rows "
                                  f"{places[0].shape[-2:]}, '{each}' {types.builtin_to_string(var.dtype)} with "
                                  f"{shape[-2:]}; expected one type, and equal last two axes")
        return places

    def apply(self) -> None:
        function, places = self._function, self._places
        rows, width = places[0].shape[-2:]
        shape = (1, places[-1].end, rows, width)
        first = function.inputs[places[0].name]
        dead = {*find_dead_ops(function), *find_unread_updates(function)}
        for each in places:
            function.inputs[each.name].name = f"{each.name}_before"
        placeholder = StateTensorPlaceholder(shape, first.dtype, name=self._new)
        merged = placeholder.outputs[0]
        merged.name = self._new
        with function:
            mb = RewriteBuilder(function, UniqueNames(function))
            with mb.at_first(self._new):
                whole = mb.read_state(input=merged, name=f"{self._new}_read")
                initial = [self._read(mb, whole, each) for each in places]
            ends = [thread_state(function, each.name, var) for each, var in zip(places, initial)]
            forward_stores(function, mb)
            for each, var in zip(places, initial):
                self._read_channels(mb, whole, each, var)
            if any(written for _, written in ends):
                self._write(mb, merged, whole, [var for var, _ in ends])
            for each in places:
                remove_function_input(function, each.name)
            add_function_input(function, self._new, placeholder)
            remove_dead_ops(function, dead)
        self._draft.gone |= {each.name: "merge_states" for each in places}
        self._declare(shape)

    def _read(self, mb: RewriteBuilder, whole: Var, place: _Place) -> Var:
        """Build the value of an original state from the merged one."""
        part = whole if place.end - place.begin == whole.shape[1] else mb.slice_by_index(
            x=whole, begin=[0, place.begin, 0, 0], end=[1, place.end, *map(int, whole.shape[2:])])
        return part if part.shape == place.shape else mb.reshape(x=part, shape=list(place.shape))

    def _read_channels(self, mb: RewriteBuilder, whole: Var, place: _Place, initial: Var) -> None:
        """Replace slices of whole rows of the original state by slices of channels of the merged state."""
        if initial is whole:
            return
        rows, width = place.shape[-2:]
        with BlockEditor() as editor:
            for op in get_consumers(initial):
                window = get_window(op) if op.op_type == "slice_by_index" else None
                channels = None if window is None or op.outputs[0] in self._function.outputs else find_channels(
                    window.bounds, place.shape)
                if channels is None:
                    continue
                with mb.at(op):
                    made = mb.slice_by_index(x=whole, begin=[0, place.begin + channels[0], 0, 0],
                                             end=[1, place.begin + channels[1], rows, width])
                    if tuple(made.shape) != tuple(op.outputs[0].shape):
                        made = mb.reshape(x=made, shape=list(map(int, op.outputs[0].shape)))
                    mb.adopt_scopes(op.scopes)
                editor.replace(op.outputs[0], made)

    def _write(self, mb: RewriteBuilder, merged: Var, whole: Var, ends: Sequence[Var]) -> None:
        """Write the merged state at the end of the function."""
        rows, width = map(int, whole.shape[2:])
        with mb.at_end(self._new):
            parts: list[Var] = []
            for place, final in zip(self._places, ends):
                stores = join_stores(mb, final)
                for value in [final] if stores is None else [value for _, _, value in stores]:
                    if value.op is not None and value.op.op_type == "expand_dims" and (
                            tuple(value.op.x.shape) == (1, math.prod(value.shape[:-2]), rows, width)):
                        value = value.op.x
                    channels = (1, math.prod(value.shape[:-2]), rows, width)
                    parts.append(value if tuple(value.shape) == channels else mb.reshape(x=value, shape=channels))
            new = parts[0] if len(parts) == 1 else mb.concat(values=parts, axis=1, interleave=False)
            mb.coreml_update_state(state=merged, value=new, name=f"{self._new}_write")

    def _declare(self, shape: tuple[int, ...]) -> None:
        def merge(values: Mapping[str, Any]) -> Any:
            return np.concatenate([np.reshape(values[each.name], (1, -1, *shape[2:])) for each in self._places], 1)

        changes = [InterfaceChange("state", each.name, self._new, "reshaped", unmap=_make_reader(each))
                   for each in self._places]
        self._draft.change_interface(self._name, *changes, InterfaceChange(
            "state", None, self._new, "added", make=merge))
        listed = ", ".join(f"'{each.name}' ({', '.join(map(str, each.shape))})" for each in self._places)
        self._draft.done.append(EditRecord(
            _OPTION, self._name, self._new, f"state '{self._new}' ({', '.join(map(str, shape))}) holds {listed} as "
            "channels; it is read once and written once", True, True))


def _make_reader(place: _Place) -> Any:
    def read(value: Any) -> Any:
        return np.reshape(np.asarray(value)[:, place.begin:place.end], place.shape)

    return read


def find_channels(bounds: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the channels of a window of whole rows if they are consecutive; None otherwise."""
    if any(bounds[axis] != (0, shape[axis]) for axis in (len(shape) - 2, len(shape) - 1)):
        return None
    places = np.arange(math.prod(shape[:-2])).reshape(shape[:-2])[tuple(slice(*bound) for bound in bounds[:-2])]
    flat = places.reshape(-1)
    if not flat.size or flat[-1] - flat[0] + 1 != flat.size:
        return None
    return int(flat[0]), int(flat[-1]) + 1
