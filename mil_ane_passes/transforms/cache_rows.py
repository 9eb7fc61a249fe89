"""Caches that are inputs, and outputs with new rows appended: the caller keeps the cache, and only new rows are output.

This transform runs after `PadShape`, which appends rows to a padded cache as `cache * (1 - m) + rows @ new`. The input
cache then has room for the new rows, and the shape (1, channels, rows, width).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Placeholder, Var

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.coremltools_internals import add_function_input, remove_function_input
from ..ir.query import get_consumers, get_static_shape, is_const
from ..package.interface import describe_feature, get_feature
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, remove_dead_ops
from .merge_states import find_channels
from .state_flow import get_window
from .state_to_io import RowWrite, match_row_write

__all__ = ["CacheRows", "narrow_channels"]


@dataclass(frozen=True)
class _Part:
    """A part of a cache, channels [begin, end) of the new shape, and the value `written` that contains its new rows."""

    begin: int
    end: int
    view: Var
    room: Operation
    written: Var
    write: RowWrite


@dataclass(frozen=True)
class CacheRows(Transform):
    """Gives input caches a fixed size, and replaces outputs of all rows by outputs of the new rows only.

    `caches` maps inputs to outputs. An input keeps its name; its output is called NAME_rows.
    """

    caches: Mapping[str, str]

    def apply(self, draft: Draft) -> list[Draft]:
        """Change the draft in place. Raises InputError, with the op, if a cache is used in another way."""
        for name, function in draft.program.functions.items():
            for cache, output in self.caches.items():
                _CacheChange(draft, name, function, cache, output).apply()
        return [draft]


class _CacheChange:
    """The change of one cache."""

    def __init__(self, draft: Draft, name: str, function: Function, cache: str, output: str) -> None:
        self._draft, self._name, self._function = draft, name, function
        self._cache, self._old_output = cache, output
        self._input = function.inputs[cache]
        self._shape = get_static_shape(self._input) or ()
        self._output = next(var for var in function.outputs if var.name == output)
        if len(self._shape) < 3:
            raise InputError(f"the cache '{cache}' has rank {len(self._shape)}; expected (..., rows, width)")

    def apply(self) -> None:
        function, parts = self._function, self._find_parts()
        write = parts[0].write
        count = int(write.new.shape[-2])
        rows, width = self._shape[-2] + count, self._shape[-1]
        channels = math.prod(self._shape[:-2])
        shape = (1, channels, rows, width)
        dead = set(find_dead_ops(function))
        self._input.name = f"{self._cache}_before"
        placeholder = Placeholder(shape, self._input.dtype, name=self._cache)
        made = placeholder.outputs[0]
        made.name = self._cache
        with function:
            mb = RewriteBuilder(function, UniqueNames(function))
            remove_function_input(function, self._cache)
            add_function_input(function, self._cache, placeholder)
            with BlockEditor() as editor:
                for part in parts:
                    with mb.at(part.room):
                        view = made if (part.begin, part.end) == (0, channels) else mb.slice_by_index(
                            x=made, begin=[0, part.begin, 0, 0], end=[1, part.end, rows, width])
                        old = part.room.outputs[0]
                        view = view if view.rank == old.rank else mb.reshape(x=view, shape=list(map(int, old.shape)))
                        mb.adopt_scopes(part.room.scopes)
                    editor.replace(old, view)
            with mb.at_end(self._cache):
                new = self._join_rows(mb, parts, count)
            output = new.name = mb.make_unique_name(f"{self._cache}_rows")
            function.set_outputs([new if var is self._output else var for var in function.outputs])
            remove_dead_ops(function, dead)
        self._declare(shape, output, count, write)

    def _join_rows(self, mb: RewriteBuilder, parts: Sequence[_Part], count: int) -> Var:
        width = self._shape[-1]
        values = []
        for part in sorted(parts, key=lambda each: each.begin):
            shape = (1, part.end - part.begin, count, width)
            value = part.write.new
            values.append(value if tuple(value.shape) == shape else mb.reshape(x=value, shape=list(shape)))
        if len(values) > 1:
            return mb.concat(values=values, axis=1, interleave=False)
        return mb.identity(x=values[0]) if values[0] in self._function.outputs or values[0].op is None else values[0]

    def _find_parts(self) -> list[_Part]:
        """Find the parts of the cache to which rows are appended. Raises InputError for any other use of the cache."""
        found: dict[int, _Part] = {}
        for view, bounds in self._list_views():
            if not get_consumers(view):
                continue
            channels = find_channels(bounds, self._shape)
            rooms = [op for op in get_consumers(view) if op.op_type == "concat" and _is_room(op, view)]
            users = [op for op in get_consumers(view) if op not in rooms]
            if channels is None or users or len(rooms) != 1:
                op = users[0] if users else view.op
                raise self._make_error(op, "expected rows that are appended to entire rows of the cache, of one layer "
                                           "after the other")
            written = [user.outputs[0] for op in get_consumers(rooms[0].outputs[0]) for user in get_consumers(
                op.outputs[0]) if user.op_type == "add"]
            write = match_row_write(written[0]) if len(written) == 1 else None
            if write is None or write.axis != written[0].rank - 2 or write.old is not rooms[0].outputs[0]:
                raise self._make_error(rooms[0], "expected new rows after those of the cache")
            found[channels[0]] = _Part(*channels, view, rooms[0], written[0], write)
        parts = [found[begin] for begin in sorted(found)]
        ends = [0, *(part.end for part in parts)]
        if not parts or any(part.begin != end for part, end in zip(parts, ends)) or (
                ends[-1] != math.prod(self._shape[:-2])):
            raise self._make_error(None, "expected that rows are appended to all of it")
        if self._list_returned() != [part.written for part in parts]:
            raise InputError(f"the output '{self._old_output}' is not the cache '{self._cache}' with rows appended to "
                             "each layer in order; expected these stacked along the first axis")
        return parts

    def _list_views(self) -> list[tuple[Var, tuple[tuple[int, int], ...]]]:
        """List the values that are parts of the cache, with their bounds."""
        whole = tuple((0, size) for size in self._shape)
        views: list[tuple[Var, tuple[tuple[int, int], ...]]] = []
        for op in get_consumers(self._input):
            window = get_window(op) if op.op_type == "slice_by_index" else None
            if window is not None:
                views.append((op.outputs[0], window.bounds))
            elif op.op_type == "concat" and _is_room(op, self._input):
                views.append((self._input, whole))
            elif op.op_type == "gather" and is_const(op.indices) and op.indices.rank == 0 and not int(op.axis.val):
                index = int(op.indices.val) % self._shape[0]
                views.append((op.outputs[0], ((index, index + 1), *whole[1:])))
            elif op.op_type == "split" and not int(op.axis.val):
                views += [(var, bounds) for var, bounds in zip(op.outputs, _list_splits(op, whole))]
            else:
                raise self._make_error(op, "expected layers of the cache by slices, or rows appended to all of it")
        return [(_skip_squeeze(var), bounds) for var, bounds in views]

    def _list_returned(self) -> list[Var]:
        """List the values that are stacked along the first axis of the output."""
        op = self._output.op
        if op is not None and op.op_type == "stack" and not int(op.axis.val):
            return list(op.values)
        if op is not None and op.op_type == "concat" and not int(op.axis.val) and not op.interleave.val:
            return [_skip_expansion(var) for var in op.values]
        return [_skip_expansion(self._output)]

    def _make_error(self, op: Operation | None, expected: str) -> InputError:
        who = "nothing" if op is None else f"the op '{op.outputs[0].name}' ({op.op_type})"
        return InputError(f"the cache '{self._cache}' is read by {who}; {expected}")

    def _declare(self, shape: tuple[int, ...], output: str, count: int, write: RowWrite) -> None:
        cache, before = self._cache, self._shape
        rows = shape[2]
        feature = get_feature(self._function, cache)
        if feature is not None:
            made = type(feature)()
            made.CopyFrom(feature)
            made.type.multiArrayType.shape[:] = shape
            made.type.multiArrayType.ClearField("shapeRange")
            describe_feature(self._function, made)

        def grow(value: Any) -> Any:
            held = np.reshape(value, (1, shape[1], -1, shape[3]))
            return np.pad(held, [(0, 0), (0, 0), (0, rows - held.shape[2]), (0, 0)])

        def shrink(value: Any) -> Any:
            return np.reshape(np.asarray(value)[:, :, :before[-2]], before)

        def take(value: Any) -> Any:
            return np.reshape(np.asarray(value)[..., -count:, :], (1, shape[1], count, shape[3]))

        def append(value: Any, feeds: Mapping[str, Any]) -> Any:
            past = np.asarray(feeds[cache])
            new = np.reshape(value, (*before[:-2], count, before[-1]))
            joined = np.concatenate([past.astype(np.result_type(past, new)), new], -2)
            return np.pad(joined, [(0, 0)] * (joined.ndim - 2) + [(0, rows - joined.shape[-2]), (0, 0)])

        self._draft.change_interface(
            self._name, InterfaceChange("input", cache, cache, "reshaped", map=grow, unmap=shrink),
            InterfaceChange("output", self._old_output, output, "reshaped", map=take, unmap_with=append))
        where = f"'{write.position}'" + (f" {write.offset:+d}" if write.offset else "")
        self._draft.done.append(EditRecord(
            "", self._name, cache, f"cache '{cache}' is ({', '.join(map(str, shape))}); output '{output}', its new "
            f"rows alone, replaces '{self._old_output}': the caller writes them along axis 2 from row {where} on"))


def narrow_channels(draft: Draft, name: str, cache: str) -> list[tuple[int, int]]:
    """Reduce the input `cache` of function `name` to the channels that the function reads; it keeps its name.

    Returns the channels as ranges of the whole cache: a single range of all channels if other ops than slices read it.
    """
    function = draft.program.functions[name]
    held = function.inputs[cache]
    shape = get_static_shape(held) or ()
    whole = [(0, int(shape[1]))]
    windows = [get_window(op) if op.op_type == "slice_by_index" else None for op in get_consumers(held)]
    read = [window.bounds for window in windows if window is not None and not window.dropped]
    if not read or len(read) < len(windows) or held in function.outputs:
        return whole
    ranges = _join_ranges([bounds[1] for bounds in read])
    if ranges == whole:
        return whole
    _replace_input(function, held, cache, ranges, read)
    narrow = (shape[0], sum(end - begin for begin, end in ranges), *shape[2:])
    feature = get_feature(function, cache)
    if feature is not None:
        described = type(feature)()
        described.CopyFrom(feature)
        described.type.multiArrayType.shape[:] = narrow
        describe_feature(function, described)
    draft.change_interface(name, InterfaceChange(
        "input", cache, cache, "reshaped",
        map=lambda value: np.concatenate([np.asarray(value)[:, begin:end] for begin, end in ranges], 1)))
    return ranges


def _join_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge sorted ranges that touch or overlap."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _replace_input(
    function: Function, held: Var, cache: str, ranges: Sequence[tuple[int, int]],
    read: Sequence[tuple[tuple[int, int], ...]],
) -> None:
    """Replace the input `held`, of which slices `read` these bounds, by an input of the channels in `ranges`."""
    users, shape = get_consumers(held), get_static_shape(held) or ()
    narrow = (shape[0], sum(end - begin for begin, end in ranges), *shape[2:])
    held.name = f"{cache}_whole"
    placeholder = Placeholder(narrow, held.dtype, name=cache)
    made = placeholder.outputs[0]
    made.name = cache
    with function:
        mb = RewriteBuilder(function, UniqueNames(function))
        remove_function_input(function, cache)
        add_function_input(function, cache, placeholder)
        with BlockEditor() as editor:
            for op, bounds in zip(users, read, strict=True):
                before = sum(end - begin for begin, end in ranges if end <= bounds[1][0])
                start = next(begin for begin, end in ranges if begin <= bounds[1][0] < end)
                shift = before - start
                moved = [bounds[0], (bounds[1][0] + shift, bounds[1][1] + shift), *bounds[2:]]
                with mb.at(op):
                    view = mb.slice_by_index(x=made, begin=[begin for begin, _ in moved], end=[end for _, end in moved])
                    mb.adopt_scopes(op.scopes)
                editor.replace(op.outputs[0], view)
                editor.remove([op])


def _is_room(op: Operation, first: Var) -> bool:
    """Return whether a concat appends zeros along the rows, into which new rows are written."""
    values = list(op.values)
    return len(values) == 2 and values[0] is first and is_const(values[1]) and (
        int(op.axis.val) % first.rank == first.rank - 2) and not np.any(values[1].val)


def _list_splits(op: Operation, whole: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], ...]]:
    ends = np.cumsum([int(var.shape[0]) for var in op.outputs])
    return [((int(end) - int(var.shape[0]), int(end)), *whole[1:]) for var, end in zip(op.outputs, ends)]


def _skip_squeeze(var: Var) -> Var:
    """Return the squeezed value if a squeeze is the only user of `var`, else `var`."""
    users = get_consumers(var)
    return users[0].outputs[0] if len(users) == 1 and users[0].op_type == "squeeze" else var


def _skip_expansion(var: Var) -> Var:
    while var.op is not None and var.op.op_type in ("expand_dims", "identity"):
        var = var.op.x
    return var
