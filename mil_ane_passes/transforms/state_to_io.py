"""`--state-to-io`: states become inputs, and their final values, or only the new rows, become outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Placeholder, Var, types

from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.coremltools_internals import add_function_input, remove_function_input
from ..ir.query import get_static_shape, is_const
from ..passes.interface_change import CarriedState, InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, find_unread_updates, remove_dead_ops
from .expose import can_have_fp16_interface
from .names import make_unknown_name_error
from .state_flow import Window, find_state_obstacle, forward_stores, get_window, join_stores, thread_state

__all__ = ["StateToIo"]

_OPTION = "--state-to-io"


@dataclass(frozen=True)
class RowWrite:
    """Rows written by a mask: `new` in the rows of `old` along `axis`, from the integer input `position` + `offset`."""

    old: Var
    new: Var
    axis: int
    position: str
    offset: int


@dataclass(frozen=True)
class StateToIo(Transform):
    """Converts the states `names`, or all states, to inputs and outputs.

    The input has the name of the state. If only rows are written, at one position that an integer input states (as
    after `PadShape`), the output is NAME_rows with the new rows only. Otherwise it is NAME_new with the entire state.
    """

    names: Sequence[str] = ()
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Change the draft in place. Raises InputError for an unknown state, and for a state used in a nested block."""
        functions = draft.select_functions(self.function)
        known = {name for function in functions.values() for name in _list_states(function)}
        for name in self.names:
            if name not in known:
                raise make_unknown_name_error(name, format_option_values("state_to_io", name), known, "state",
                                              draft.gone)
        if not known:
            raise InputError(f"{format_option_values('state_to_io')}: the model has no states")
        for name, function in functions.items():
            for state in _list_states(function):
                if not self.names or state in self.names:
                    _move_state(draft, name, function, state)
        return [draft]


def _list_states(function: Function) -> list[str]:
    return [name for name, var in function.inputs.items() if types.is_state(var.sym_type)]


def _move_state(draft: Draft, name: str, function: Function, state: str) -> None:
    obstacle = find_state_obstacle(function, state)
    shape = get_static_shape(function.inputs[state])
    if obstacle or shape is None:
        raise InputError(f"{format_option_values('state_to_io', state)}: the state cannot be converted: "
                         f"{obstacle or 'its shape is not fixed'}")
    old = function.inputs[state]
    if old.dtype == types.fp16 and not can_have_fp16_interface(function):
        raise InputError(f"{format_option_values('state_to_io', state)}: the state is fp16, and inputs of this model "
                         "cannot be fp16; convert the source model for iOS16 or later")
    dead = {*find_dead_ops(function), *find_unread_updates(function)}
    old.name = f"{state}_state"
    placeholder = Placeholder(shape, old.dtype, name=state)
    initial = placeholder.outputs[0]
    initial.name = state
    rows: RowWrite | None = None
    output = ""
    with function:
        names = UniqueNames(function)
        mb = RewriteBuilder(function, names)
        final, written = thread_state(function, state, initial)
        forward_stores(function, mb)
        remove_function_input(function, state)
        add_function_input(function, state, placeholder)
        if written:
            with mb.at_end(state):
                found = _find_rows(mb, final, initial)
                made, rows = (_join_parts(mb, final), None) if found is None else found
                output = names.make_unique_name(f"{state}_{'new' if rows is None else 'rows'}")
                made = mb.identity(x=made, name=output) if made.op is None or made in function.outputs or (
                    is_const(made)) else made
            made.name = output
            function.set_outputs([*function.outputs, made])
        remove_dead_ops(function, dead)
    _declare(draft, name, state, output, rows, shape)


def _join_parts(mb: RewriteBuilder, final: Var) -> Var:
    """Return a concat of the parts that were stored into a value, if they cover all of it; else the value."""
    stores = join_stores(mb, final)
    if stores is None or len(stores) < 2:
        return final
    return mb.concat(values=[value for _, _, value in stores], axis=0, interleave=False)


def _declare(draft: Draft, name: str, state: str, output: str, rows: RowWrite | None, shape: tuple[int, ...]) -> None:
    carried = CarriedState(state, output or None, _keep_value if rows is None else _make_writer(rows))
    changes = [InterfaceChange("state", state, None, "removed", carried=carried)]
    if output:
        changes.append(InterfaceChange("output", None, output, "added"))
    draft.change_interface(name, *changes)
    note = f"state '{state}' ({', '.join(map(str, shape))}) is an input"
    if rows is not None:
        where = f"'{rows.position}'" + (f" {rows.offset:+d}" if rows.offset else "")
        note += (f"; output '{output}' is its new rows along axis {rows.axis}: the caller writes them from row {where} "
                 "on")
    elif output:
        note += f"; output '{output}' is what it holds afterwards: the next call's input"
    draft.done.append(EditRecord(_OPTION, name, state, note, True, True))


def _keep_value(state: Any, output: Any, feeds: Mapping[str, Any]) -> Any:
    return output


def _make_writer(rows: RowWrite) -> Callable[[Any, Any, Mapping[str, Any]], Any]:
    def write(state: Any, output: Any, feeds: Mapping[str, Any]) -> Any:
        begin = int(np.reshape(feeds[rows.position], -1)[0]) + rows.offset
        made = np.array(state, np.result_type(state, output))  # keeps the precision of results at full precision
        place: list[Any] = [slice(None)] * made.ndim
        place[rows.axis] = slice(begin, begin + np.shape(output)[rows.axis])
        made[tuple(place)] = output
        return made

    return write


def _find_rows(mb: RewriteBuilder, final: Var, initial: Var) -> tuple[Var, RowWrite] | None:
    """Return the new rows of `final` if it differs from `initial` only in rows at one position; None otherwise."""
    parts = _list_parts(mb, final)
    writes = []
    for axis, begin, end, part in parts:
        value = _skip_reshapes(part)
        inner, added = (value.op.x, True) if value.op is not None and value.op.op_type == "expand_dims" and (
            [int(each) for each in np.atleast_1d(value.op.axes.val)] == [0]) else (value, False)
        write = match_row_write(inner)
        if write is None or not _is_part(write.old, initial, axis, begin, end, added):
            return None
        writes.append((write, added))
    if not writes or len({(write.axis + added, write.position, write.offset) for write, added in writes}) != 1:
        return None
    write, added = writes[0]
    if len(parts) > 1 and write.axis + added == parts[0][0]:
        return None  # rows of several parts along one axis are at several places
    values = [mb.expand_dims(x=each.new, axes=[0]) if lifted else each.new for each, lifted in writes]
    if len({tuple(value.shape) for value in values}) != 1 and parts[0][0] != 0:
        values = list(values)
    made = values[0] if len(values) == 1 else mb.concat(values=values, axis=parts[0][0], interleave=False)
    return made, RowWrite(initial, made, write.axis + added, write.position, write.offset)


def _skip_reshapes(value: Var) -> Var:
    """Return the first of the values of equal elements and shape, of which reshapes made `value`."""
    var = found = value
    while var.op is not None and var.op.op_type in ("expand_dims", "reshape", "squeeze"):
        var = var.op.x
        found = var if tuple(var.shape) == tuple(value.shape) else found
    return found


def _list_parts(mb: RewriteBuilder, final: Var) -> list[tuple[int, int, int, Var]]:
    """Return the parts of a value: axis, begin, end, value."""
    stores = join_stores(mb, final)
    if stores is not None:
        return [(0, begin, end, value) for begin, end, value in stores]
    if final.op is not None and final.op.op_type == "concat" and not final.op.interleave.val:
        axis = int(final.op.axis.val) % final.rank
        ends = np.cumsum([int(var.shape[axis]) for var in final.op.values])
        return [(axis, int(end) - int(var.shape[axis]), int(end), var) for var, end in zip(final.op.values, ends)]
    return [(0, 0, int(final.shape[0]), final)]


def _is_part(old: Var, initial: Var, axis: int, begin: int, end: int, dropped: bool) -> bool:
    """Return whether `old` is the part [begin, end) of the state along an axis."""
    if old is initial:
        return not dropped and (begin, end) == (0, int(initial.shape[axis]))
    op = old.op
    if op is None or op.op_type != "slice_by_index" or op.x is not initial:
        return False
    bounds = tuple((begin, end) if place == axis else (0, int(size)) for place, size in enumerate(initial.shape))
    return get_window(op) == Window(bounds, (axis,) if dropped else ())


def match_row_write(var: Var) -> RowWrite | None:
    """Match `old * (1 - m) + new * m`, or `+ rows @ new`, with a mask m of rows at a position that an input states."""
    if var.op is None or var.op.op_type != "add" or any(
            side.op is None or side.op.op_type not in ("mul", "matmul") for side in (var.op.x, var.op.y)):
        return None
    kept, written = var.op.x.op, var.op.y.op
    if kept.op_type != "mul" or kept.y.op is None or kept.y.op.op_type != "sub" or not _is_one(kept.y.op.x):
        return None
    mask = kept.y.op.y
    if written.op_type == "mul":
        new, rows, good = written.x, mask, written.y is mask and written.x.rank == mask.rank
    else:
        new, rows = written.y, written.x
        good = mask.op is not None and mask.op.op_type == "reduce_sum" and mask.op.x is rows and not (
            written.transpose_x.val or written.transpose_y.val)
    axes = [axis for axis, size in enumerate(mask.shape) if size != 1]
    place = _find_place(rows)
    if not good or len(axes) != 1 or place is None or mask.rank != var.rank:
        return None
    if written.op_type == "mul" and new.shape[axes[0]] != 1:
        return None  # one of several values is written, each in a row of its own
    return RowWrite(kept.x, new, axes[0], *place)


def _is_one(var: Var) -> bool:
    return is_const(var) and np.asarray(var.val).size == 1 and float(np.asarray(var.val).reshape(-1)[0]) == 1.0


def _find_place(rows: Var) -> tuple[str, int] | None:
    """Return the integer input that states the first row of a one-hot matrix, and the constant added to it."""
    var = rows
    while var.op is not None and var.op.op_type in ("cast", "expand_dims", "reshape"):
        var = var.op.x
    if var.op is None or var.op.op_type != "equal" or not is_const(var.op.x):
        return None
    numbers = np.asarray(var.op.x.val).reshape(-1)
    if not np.array_equal(numbers, np.arange(numbers.size)):
        return None
    var = var.op.y
    while var.op is not None and var.op.op_type in ("expand_dims", "squeeze", "reshape"):
        var = var.op.x
    if var.op is None or var.op.op_type != "add" or var.op.x.op is not None or not is_const(var.op.y):
        return None
    offsets = np.asarray(var.op.y.val).reshape(-1)
    if not np.array_equal(offsets, np.arange(offsets[0], offsets[0] + offsets.size)):
        return None
    return var.op.x.name, int(offsets[0])
