"""Source values of the rows of a list or tensor whose rows are written and read one by one at constant indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import ListVar, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.query import get_const_value, is_const
from ..constants._compile_time_constants import get_constant_value

__all__ = ["ROW_PRESERVING_OPS", "WRITE_OPS", "Row", "RowTable", "Rows"]

WRITE_OPS = frozenset({"scatter", "list_write", "list_scatter"})
ROW_PRESERVING_OPS = frozenset({"concat", "reverse", "slice_by_index", "cast", "identity"})
"Ops that only move or cast the rows of their inputs."
_FLOAT_NAMES = {types.fp16: "fp16", types.fp32: "fp32"}


@dataclass(frozen=True)
class Row:
    """Row `place` of `source`. Where `place` is None it is all of `source`, with an extent of 1 at the axis, or
    (`bare`) without that axis. `casts` are applied to it."""

    source: Var
    place: int | None = None
    bare: bool = False
    casts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """The rows along `axis`; None is a row that was never written. `written`: whether any row was written."""

    axis: int
    rows: tuple[Row | None, ...]
    written: bool = False


class RowTable:
    """The rows of values, inferred in program order; a value has `most` rows at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: dict[tuple[Var, int], Rows | None] = {}
        self._list_rows: dict[Var, Rows] = {}
        self.bare: dict[Var, Row] = {}
        "Values read without the axis, as rows."

    def of(self, var: Var, axis: int) -> Rows | None:
        """Return the rows of `var` along `axis`; None where their number is unknown or too large."""
        if isinstance(var, ListVar):
            return self._list_rows.get(var)
        key = (var, axis)
        if key not in self._found:
            self._found[key] = self._derive_rows(var, axis) or self._plain(var, axis)
        return self._found[key]

    def write(self, op: Operation) -> str | None:
        """Record the output of `op`, a writer or make_list; return why it is unknown, or None."""
        if op.op_type == "scatter":
            return self._write_scatter(op)
        if op.op_type == "make_list":
            length = get_const_value(op.init_length)
            if length is None or not 0 <= length <= self._most:
                return f"a list of {'unknown length' if length is None else f'{length} elements'}"
            self._list_rows[op.outputs[0]] = Rows(0, (None,) * length)
            return None
        rows, places = self._list_rows.get(op.ls), self.places(op.index if op.op_type == "list_write" else op.indices)
        if rows is None or places is None:
            return "the list is not known" if places is not None else "its index is known only at run time"
        if max(places, default=0) >= self._most or min(places, default=0) < 0:
            return f"an index beyond {self._most} rows (max_parts)"
        made = (
            (self._find_bare_row(op.value),)
            if op.op_type == "list_write"
            else self._read_update_rows(op.value, 0, len(places))
        )
        if made is None:
            return "the number of values is not known"
        self._list_rows[op.outputs[0]] = self._put(rows, places, made)
        return None

    def read(self, op: Operation) -> Rows | None:
        """Return the rows that `op` reads at constant indices; None where it does something else."""
        if op.op_type in ("list_read", "list_gather"):
            source = self._list_rows.get(op.ls)
            places = self.places(op.index if op.op_type == "list_read" else op.indices)
            return _select_rows(source, places)
        if op.op_type == "gather":
            axis, places = get_const_value(op.axis), self.places(op.indices)
            if axis is None or not op.x.rank or op.indices.rank > 1 or get_const_value(op.inputs.get("batch_dims"), 0):
                return None
            source = self.of(op.x, int(axis) % op.x.rank)
            if source is None or places is None:
                return None
            return _select_rows(source, [place + len(source.rows) if place < 0 else place for place in places])
        return None

    def places(self, var: Var) -> list[int] | None:
        """Return the constant indices in `var`, or None."""
        held = get_constant_value(var) if types.is_int(var.dtype) else None
        return None if held is None else [int(place) for place in np.ravel(held)]

    def _find_bare_row(self, var: Var) -> Row:
        return self.bare.get(var, Row(var, bare=True))

    def _write_scatter(self, op: Operation) -> str | None:
        axis, places, mode = get_const_value(op.axis), self.places(op.indices), get_const_value(op.mode)
        if places is None or axis is None:
            return "its indices are known only at run time"
        if mode not in ("add", "update") or op.indices.rank != 1:
            return f"a scatter that is no plain one ({mode})"
        if op.data.rank == 1 and len(places) > 1:  # an assignment to a slice, flattened: a mask is cheaper
            return "single elements of a flat tensor"
        axis = int(axis) % op.data.rank
        rows, made = self.of(op.data, axis), self._read_update_rows(op.updates, axis, len(places))
        if rows is None or made is None:
            return f"a number of rows that is not known, or more than {self._most} (max_parts)"
        if len(set(places)) < len(places) or not all(0 <= place < len(rows.rows) for place in places):
            return "it writes twice to one place, or to none"
        if mode == "add" and not all(_is_zero(rows.rows[place], axis) for place in places):
            return "it adds to what may not be zero"
        self._found[op.outputs[0], axis] = self._put(rows, places, made)
        return None

    def _put(self, rows: Rows, places: Sequence[int], made: Sequence[Row]) -> Rows:
        now = list(rows.rows) + [None] * (max(places, default=-1) + 1 - len(rows.rows))
        for place, row in zip(places, made):
            now[place] = row
        return Rows(rows.axis, tuple(now), True)

    def _read_update_rows(self, var: Var, axis: int, count: int) -> tuple[Row, ...] | None:
        rows = self.of(var, axis)
        if rows is None or len(rows.rows) != count or any(row is None for row in rows.rows):
            return None
        return tuple(row for row in rows.rows if row is not None)

    def _plain(self, var: Var, axis: int) -> Rows | None:
        extent = var.shape[axis]
        if is_symbolic(extent) or not 0 < int(extent) <= self._most:
            return None
        if (
            var.op is not None
            and var.op.op_type == "expand_dims"
            and get_const_value(var.op.axes) in ([axis], [axis - var.rank])
        ):
            return Rows(axis, (self._find_bare_row(var.op.x),))
        count = int(extent)
        return Rows(axis, (Row(var),) if count == 1 else tuple(Row(var, place) for place in range(count)))

    def _derive_rows(self, var: Var, axis: int) -> Rows | None:
        """Derive the rows of an op that only moves or casts the rows of others."""
        op = var.op
        if op is None or op.op_type not in ROW_PRESERVING_OPS | {"gather"}:
            return None
        if op.op_type == "gather":
            same = (
                get_const_value(op.axis) is not None
                and op.indices.rank == 1
                and int(get_const_value(op.axis)) % op.x.rank == axis
            )
            return self.read(op) if same else None
        if op.op_type == "concat":
            return self._concat_rows(op, axis)
        before = self.of(op.x, axis)
        if before is None or op.op_type == "identity":
            return before
        if op.op_type == "cast":
            return _cast_rows(before, op)
        if op.op_type == "reverse":
            axes = get_const_value(op.axes)
            same = axes is not None and [each % var.rank for each in axes] == [axis]
            return replace(before, rows=before.rows[::-1]) if same else None
        places = _read_slice_indices(op, axis)
        return _select_rows(before, places)

    def _concat_rows(self, op: Operation, axis: int) -> Rows | None:
        if (
            get_const_value(op.axis) is None
            or int(get_const_value(op.axis)) % op.outputs[0].rank != axis
            or get_const_value(op.interleave, False)
        ):
            return None
        parts = [self.of(var, axis) for var in op.values]
        found = [part for part in parts if part is not None]
        rows = tuple(row for part in found for row in part.rows)
        if len(found) < len(parts) or len(rows) > self._most:
            return None
        return Rows(axis, rows, any(part.written for part in found))


def _select_rows(rows: Rows | None, places: Sequence[int] | None) -> Rows | None:
    if rows is None or places is None or not all(0 <= place < len(rows.rows) for place in places):
        return None
    taken = tuple(rows.rows[place] for place in places)
    return None if any(row is None for row in taken) or not taken else Rows(rows.axis, taken, rows.written)


def _cast_rows(rows: Rows, op: Operation) -> Rows | None:
    to = _FLOAT_NAMES.get(op.outputs[0].dtype)
    if to is None or op.x.dtype not in _FLOAT_NAMES or any(row is None for row in rows.rows):
        return None
    return replace(rows, rows=tuple(_cast_row(row, to) for row in rows.rows if row is not None))


def _cast_row(row: Row, to: str) -> Row:
    """Cast `row`; an fp16 row that is cast back to fp16 is the row itself."""
    held = _FLOAT_NAMES.get(row.source.dtype, "")
    if row.casts == ("fp32",) and to == "fp16" and held == "fp16":
        return replace(row, casts=())
    if (row.casts[-1] if row.casts else held) == to:
        return row
    return replace(row, casts=(*row.casts, to))


def _is_zero(row: Row | None, axis: int) -> bool:
    """Return whether adding to `row` changes nothing, except for the sign of a zero."""
    if row is None or row.bare or row.source.op is None:
        return row is None
    if row.source.op.op_type == "fill":
        return bool(get_const_value(row.source.op.inputs.get("value"), 0) == 0)
    if not is_const(row.source):
        return False
    held: Any = np.asarray(row.source.val)
    return not np.any(held if row.place is None else held.take(row.place, axis))


def _read_slice_indices(op: Operation, axis: int) -> list[int] | None:
    """Return the indices along `axis` that a slice_by_index reads, if it reads all of every other axis; else None."""
    rank, size = op.x.rank, op.x.shape[axis]
    begin, end = get_const_value(op.begin), get_const_value(op.end)
    if begin is None or end is None or is_symbolic(size) or any(get_const_value(op.squeeze_mask) or ()):
        return None
    free, ends = (get_const_value(given) or [False] * rank for given in (op.begin_mask, op.end_mask))
    stride = get_const_value(op.stride) or [1] * rank
    for each in range(rank):
        whole = stride[each] == 1 and (free[each] or begin[each] == 0) and (ends[each] or end[each] == op.x.shape[each])
        if each != axis and not whole:
            return None
    first, last = (None if masked[axis] else given[axis] + int(size) * (given[axis] < 0)
                   for given, masked in ((begin, free), (end, ends)))
    return list(range(int(size))[first:last:stride[axis]])
