"""Pass values that are written and read at constant indices directly from op to op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, ListVar, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_consumers, is_const
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_ane_compiler, cite_m4_study
from ...passes.examples import make_example
from ...rules.control_flow import ControlFlow
from ...utils.text_format import format_count
from ..constants._compile_time_constants import get_constant_value

_WRITE_OPS = frozenset({"scatter", "list_write", "list_scatter"})
_ROW_PRESERVING_OPS = frozenset({"concat", "reverse", "slice_by_index", "cast", "identity"})
"Ops that only move or cast the rows of their inputs."
_FLOAT_NAMES = {types.fp16: "fp16", types.fp32: "fp32"}
_READ_OPS = frozenset({"gather", "list_read", "list_gather", "slice_by_index", "reverse", "squeeze"})


class ListsAsStack(BlockRewrite):
    """Pass values directly that are stored in a list, or in rows of a tensor, at constant indices.

    why     list ops and scatter are unsupported on the ANE. The loop of a torch GRU writes each state into a row of a
            tensor and reads it in the next step: unrolled, this is a chain of scatters and gathers at constant indices.
    when    Chains of list_write and list_scatter, and of scatters (update, or add to rows of zeros) along one axis, at
            constant indices, all in one block. Values read row by row are split once; values used as a whole become one
            stack or concat. A single scatter without reads of single rows is not matched.
    exact   rounding: each element is the written one; a -0.0 that was added to a zero stays -0.0. Lists are bitwise.
    cost    none: less data movement than before.

    before
        %0: fp16[3, 8] = fill(shape=[3, 8])
        %1: fp16[1, 8] = gather(x=%x, indices=[0])
        %2: fp16[1, 8] = gather(x=%0, indices=[0])
        %3: fp16[1, 8] = add(x=%1, y=%2)
        %4: fp16[1, 8] = tanh(x=%3)
        %5: fp16[3, 8] = scatter(data=%0, indices=[1], updates=%4)
        %6: fp16[1, 8] = gather(x=%x, indices=[1])
        %7: fp16[1, 8] = gather(x=%5, indices=[1])
        %8: fp16[1, 8] = add(x=%6, y=%7)
        %9: fp16[1, 8] = tanh(x=%8)
        %10: fp16[3, 8] = scatter(data=%5, indices=[2], updates=%9)
        %y: fp16[2, 8] = slice_by_index(x=%10, begin=[1, 0], end=[3, 8])
    after
        %0: fp16[1, 8], %1: fp16[1, 8] = split(x=%x, num_splits=2, axis=0)
        %2: fp16[3, 8] = fill(shape=[3, 8])
        %3: fp16[1, 8] = gather(x=%2, indices=[0])
        %4: fp16[1, 8] = add(x=%0, y=%3)
        %5: fp16[1, 8] = tanh(x=%4)
        %6: fp16[1, 8] = add(x=%1, y=%5)
        %7: fp16[1, 8] = tanh(x=%6)
        %y: fp16[2, 8] = concat(values=(%5, %7), axis=0)
    """

    code, slug = "ANE261", "rows-by-places"
    fixes = (ControlFlow,)
    stage = "structure"
    after = ("unroll_while_loop", "fold_constants")
    exactness = Exactness.ROUNDING
    bound = "none but the sign of a zero, where a scatter adds to zeros"
    preset = "full"
    evidence = (
        cite_m4_study("scatter and scatter_along_axis are unsupported"),
        cite_ane_compiler("the list ops and scatter have no equivalent on any generation"),
    )

    max_parts: int = 1024
    "Maximum number of rows of one list or tensor."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not any(op.op_type in _WRITE_OPS for op in block.operations):
            return
        reads = _RowReads(block, self.max_parts)
        found = reads.find_replaced_values()
        yield from reads.misses
        if found:
            adds = any(op.op_type == "scatter" for op in reads.write_ops)
            yield Hit(reads.write_ops[0], note=f"{format_count(len(reads.write_ops), 'op')} that write rows",
                      covers=reads.write_ops, exactness=None if adds else Exactness.BITWISE, found=found,
                      needed=reads.find_needed_values(found))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        replaced, used = dict[Var, Var](), set[Var]()
        values = _RowValueBuilder(mb, _collect_single_rows(hit.found.values()), replaced)
        for op in list(mb.block.operations):
            old = op.outputs[0] if op.outputs else None
            if old is None or old not in hit.needed:
                continue
            rows = hit.found[old]
            with mb.at(op):
                if _is_axis_dropped(op):
                    new = values.build_bare_row(rows.rows[0], rows.axis)
                else:
                    new = values.join_rows(rows.rows, rows.axis)
                # Two outputs of a block are two values.
                replaced[old] = mb.identity(x=new) if old.consuming_blocks and new in used else new
                used.add(new)
        return replaced

    def examples(self) -> Iterable[Example]:
        yield make_example("written and read back", _build_row_writes, x=(2, 8))
        yield make_example("a list", _build_list_writes, x=(2, 3))
        yield make_example("scattered and gathered list", _build_list_scatter, x=(2, 3))
        yield make_example("turned", lambda x: _build_row_writes(Builder.reverse(x=x, axes=[0])), x=(2, 8))
        yield make_example("by a computed place", _build_computed_scatter, x=(2, 3),
                           reason="its indices are known only at run time")
        yield make_example("adds to values", lambda x: Builder.scatter(
            data=x, indices=np.array([1], np.int32), updates=np.ones((1, 3), np.float16), axis=0, name="y"),
            reason="it adds to values that may not be zero", x=(2, 3))
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


class _RowReads:
    """The writes and reads of one block; `misses` lists the writes that are unknown, and why."""

    def __init__(self, block: Block, most: int) -> None:
        self.misses: list[Miss] = []
        self.write_ops: list[Operation] = []
        self._ops = list(block.operations)
        self._table, self._rows_by_read = _RowTable(most), dict[Var, _Rows]()
        for op in self._ops:
            if op.op_type in _WRITE_OPS or op.op_type == "make_list":
                reason = self._table.write(op)
                if reason is not None:
                    self.misses.append(Miss(op, reason))
                elif op.op_type in _WRITE_OPS:
                    self.write_ops.append(op)
            elif op.op_type in _READ_OPS:
                self._record_read(op)

    def _record_read(self, op: Operation) -> None:
        rows = self._find_rows(op)
        if rows is None:
            return
        self._rows_by_read[op.outputs[0]] = rows
        if _is_axis_dropped(op) and rows.rows[0] is not None:
            self._table.bare[op.outputs[0]] = rows.rows[0]

    def _find_rows(self, op: Operation) -> _Rows | None:
        if op.op_type == "squeeze":
            rows = self._rows_by_read.get(op.x)
            if rows is None or len(rows.rows) != 1 or _is_axis_dropped(op.x.op):
                return None
            return rows if get_const_value(op.axes) in ([rows.axis], [rows.axis - op.x.rank]) else None
        if op.op_type not in ("slice_by_index", "reverse"):
            return self._table.read(op)
        for axis in range(op.x.rank if op.x.rank == op.outputs[0].rank else 0):
            if op.op_type == "reverse" or op.x.shape[axis] != op.outputs[0].shape[axis]:
                rows = self._table.find_rows(op.outputs[0], axis)
                if rows is not None and rows.written:
                    return rows
        return None

    def find_replaced_values(self) -> dict[Var, _Rows]:
        """Return the values that are replaced, with their rows; nothing where a list is read at unknown indices."""
        found = {var: rows for var, rows in self._rows_by_read.items() if rows.written}
        for op in self._find_fully_read_writers(found):
            var = op.outputs[0]
            rows = None if isinstance(var, ListVar) else self._table.find_rows(var, int(op.axis.val) % var.rank)
            if rows is None:
                self.misses.append(Miss(op, "it is read at dynamic indices, or at indices that were not written"))
                return {}
            found[var] = rows
        if found:
            found |= self._find_unwritten_reads(found)
        return found if len(self.write_ops) > 1 or any(var in self._rows_by_read for var in found) else {}

    def _find_fully_read_writers(self, found: Mapping[Var, _Rows]) -> list[Operation]:
        """Return the writers whose output has a reader of the entire value rather than of rows."""
        writers, fully_read = set(self.write_ops), dict[Var, bool]()

        def reads_all(reader: Operation) -> bool:
            if reader in writers or any(out in found for out in reader.outputs):
                return False
            return reader.op_type not in _ROW_PRESERVING_OPS or fully_read.get(reader.outputs[0], True)

        for op in reversed(self._ops):
            for var in op.outputs:
                fully_read[var] = bool(var.consuming_blocks) or any(map(reads_all, get_consumers(var)))
        return [op for op in self.write_ops if fully_read[op.outputs[0]]]

    def _find_unwritten_reads(self, found: Mapping[Var, _Rows]) -> dict[Var, _Rows]:
        """Find reads of unwritten rows: of tensors that are read row by row, and of rows that come from elsewhere."""
        counts = _count_single_reads(_collect_single_rows(self._rows_by_read.values()))
        unwritten = dict[Var, _Rows]()
        for var, rows in self._rows_by_read.items():
            if var in found or len(rows.rows) != 1 or rows.rows[0] is None:
                continue
            source = rows.rows[0].source
            is_from_elsewhere = var.op.op_type == "gather" and source is not var.op.x
            is_split = counts.get((source, rows.axis), 0) > 1 and not is_const(source)
            if var.op.x in unwritten or is_from_elsewhere or is_split:
                unwritten[var] = rows
        return unwritten

    def find_needed_values(self, found: Mapping[Var, _Rows]) -> set[Var]:
        """Return the values of `found` with a reader that is not replaced itself."""
        writers = set(self.write_ops)

        def is_kept(reader: Operation) -> bool:
            return reader not in writers and not any(out in found for out in reader.outputs)

        needed = {var for var in found if var.consuming_blocks or any(map(is_kept, get_consumers(var)))}
        pending = list(needed)
        while pending:
            for row in found[pending.pop()].rows:
                if row is not None and row.source in found and row.source not in needed:
                    needed.add(row.source)
                    pending.append(row.source)
        return needed


class _RowTable:
    """The rows of values, inferred in program order; a value has `most` rows at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: dict[tuple[Var, int], _Rows | None] = {}
        self._list_rows: dict[Var, _Rows] = {}
        self.bare: dict[Var, _Row] = {}
        "Values read without the axis, as rows."

    def find_rows(self, var: Var, axis: int) -> _Rows | None:
        """Return the rows of `var` along `axis`; None where their number is unknown or too large."""
        if isinstance(var, ListVar):
            return self._list_rows.get(var)
        key = (var, axis)
        if key not in self._found:
            self._found[key] = self._derive_rows(var, axis) or self._enumerate_rows(var, axis)
        return self._found[key]

    def write(self, op: Operation) -> str | None:
        """Record the output of `op`, a writer or make_list; return why it is unknown, or None."""
        if op.op_type == "scatter":
            return self._write_scatter(op)
        if op.op_type == "make_list":
            length = get_const_value(op.init_length)
            if length is None or not 0 <= length <= self._most:
                return f"a list of {'unknown length' if length is None else f'{length} elements'}"
            self._list_rows[op.outputs[0]] = _Rows(0, (None,) * length)
            return None
        is_single = op.op_type == "list_write"
        rows, places = self._list_rows.get(op.ls), self._read_places(op.index if is_single else op.indices)
        if places is None:
            return "its index is dynamic"
        if rows is None:
            return "the list is not known"
        if max(places, default=0) >= self._most or min(places, default=0) < 0:
            return f"an index beyond {self._most} rows (max_parts)"
        new = (self._find_bare_row(op.value),) if is_single else self._read_update_rows(op.value, 0, len(places))
        if new is None:
            return "the number of values is not known"
        self._list_rows[op.outputs[0]] = self._replace_rows(rows, places, new)
        return None

    def read(self, op: Operation) -> _Rows | None:
        """Return the rows that `op` reads at constant indices; None where it does something else."""
        if op.op_type in ("list_read", "list_gather"):
            places = self._read_places(op.index if op.op_type == "list_read" else op.indices)
            return _select_rows(self._list_rows.get(op.ls), places)
        if op.op_type != "gather":
            return None
        axis, places = get_const_value(op.axis), self._read_places(op.indices)
        if axis is None or not op.x.rank or op.indices.rank > 1 or get_const_value(op.inputs.get("batch_dims"), 0):
            return None
        source = self.find_rows(op.x, int(axis) % op.x.rank)
        if source is None or places is None:
            return None
        return _select_rows(source, [place + len(source.rows) if place < 0 else place for place in places])

    def _read_places(self, var: Var) -> list[int] | None:
        """Return the constant indices in `var`, or None."""
        value = get_constant_value(var) if types.is_int(var.dtype) else None
        return None if value is None else [int(place) for place in np.ravel(value)]

    def _find_bare_row(self, var: Var) -> _Row:
        return self.bare.get(var, _Row(var, bare=True))

    def _write_scatter(self, op: Operation) -> str | None:
        axis, places, mode = get_const_value(op.axis), self._read_places(op.indices), get_const_value(op.mode)
        if places is None or axis is None:
            return "its indices are known only at run time"
        if mode not in ("add", "update") or op.indices.rank != 1:
            return f"a scatter with mode {mode}"
        if op.data.rank == 1 and len(places) > 1:  # a flattened slice assignment: a mask is cheaper
            return "single elements of a flat tensor"
        axis = int(axis) % op.data.rank
        rows, new = self.find_rows(op.data, axis), self._read_update_rows(op.updates, axis, len(places))
        if rows is None or new is None:
            return f"a dynamic number of rows, or more than {self._most} (max_parts)"
        if len(set(places)) < len(places) or not all(0 <= place < len(rows.rows) for place in places):
            return "it writes an index twice, or none"
        if mode == "add" and not all(_is_zero(rows.rows[place], axis) for place in places):
            return "it adds to values that may not be zero"
        self._found[op.outputs[0], axis] = self._replace_rows(rows, places, new)
        return None

    def _replace_rows(self, rows: _Rows, places: Sequence[int], new: Sequence[_Row]) -> _Rows:
        """Return `rows` with `new` at `places`; a list grows where a place is beyond its end."""
        result = list(rows.rows) + [None] * (max(places, default=-1) + 1 - len(rows.rows))
        for place, row in zip(places, new):
            result[place] = row
        return _Rows(rows.axis, tuple(result), True)

    def _read_update_rows(self, var: Var, axis: int, count: int) -> tuple[_Row, ...] | None:
        rows = self.find_rows(var, axis)
        if rows is None or len(rows.rows) != count or any(row is None for row in rows.rows):
            return None
        return tuple(row for row in rows.rows if row is not None)

    def _enumerate_rows(self, var: Var, axis: int) -> _Rows | None:
        """Return the rows of `var` itself; of an expand_dims, its input without the axis."""
        extent, op = var.shape[axis], var.op
        if is_symbolic(extent) or not 0 < int(extent) <= self._most:
            return None
        if op is not None and op.op_type == "expand_dims" and get_const_value(op.axes) in ([axis], [axis - var.rank]):
            return _Rows(axis, (self._find_bare_row(op.x),))
        count = int(extent)
        return _Rows(axis, (_Row(var),) if count == 1 else tuple(_Row(var, place) for place in range(count)))

    def _derive_rows(self, var: Var, axis: int) -> _Rows | None:
        """Derive the rows of an op that only moves or casts the rows of others."""
        op = var.op
        if op is None or op.op_type not in _ROW_PRESERVING_OPS | {"gather"}:
            return None
        if op.op_type == "gather":
            gathered = get_const_value(op.axis)
            same = gathered is not None and op.indices.rank == 1 and int(gathered) % op.x.rank == axis
            return self.read(op) if same else None
        if op.op_type == "concat":
            return self._concat_rows(op, axis)
        before = self.find_rows(op.x, axis)
        if before is None or op.op_type == "identity":
            return before
        if op.op_type == "cast":
            return _cast_rows(before, op)
        if op.op_type == "reverse":
            axes = get_const_value(op.axes)
            same = axes is not None and [each % var.rank for each in axes] == [axis]
            return replace(before, rows=before.rows[::-1]) if same else None
        return _select_rows(before, _read_slice_indices(op, axis))

    def _concat_rows(self, op: Operation, axis: int) -> _Rows | None:
        joined = get_const_value(op.axis)
        if joined is None or int(joined) % op.outputs[0].rank != axis or get_const_value(op.interleave, False):
            return None
        parts = [self.find_rows(var, axis) for var in op.values]
        found = [part for part in parts if part is not None]
        rows = tuple(row for part in found for row in part.rows)
        if len(found) < len(parts) or len(rows) > self._most:
            return None
        return _Rows(axis, rows, any(part.written for part in found))


@dataclass(frozen=True)
class _Rows:
    """The rows along `axis`; None is a row that was never written. `written`: whether any row was written."""

    axis: int
    rows: tuple[_Row | None, ...]
    written: bool = False


@dataclass(frozen=True)
class _Row:
    """Row `place` of `source`. Where `place` is None it is all of `source`, with an extent of 1 at the axis, or
    (`bare`) without that axis. `casts` are applied to it."""

    source: Var
    place: int | None = None
    bare: bool = False
    casts: tuple[str, ...] = ()


def _select_rows(rows: _Rows | None, places: Sequence[int] | None) -> _Rows | None:
    if rows is None or places is None or not all(0 <= place < len(rows.rows) for place in places):
        return None
    selected = tuple(rows.rows[place] for place in places)
    return _Rows(rows.axis, selected, rows.written) if selected and None not in selected else None


def _is_zero(row: _Row | None, axis: int) -> bool:
    """Return whether adding to `row` changes nothing, except for the sign of a zero."""
    if row is None or row.bare or row.source.op is None:
        return row is None
    if row.source.op.op_type == "fill":
        return bool(get_const_value(row.source.op.inputs.get("value"), 0) == 0)
    if not is_const(row.source):
        return False
    value: Any = np.asarray(row.source.val)
    return not np.any(value if row.place is None else value.take(row.place, axis))


def _cast_rows(rows: _Rows, op: Operation) -> _Rows | None:
    to = _FLOAT_NAMES.get(op.outputs[0].dtype)
    if to is None or op.x.dtype not in _FLOAT_NAMES or any(row is None for row in rows.rows):
        return None
    return replace(rows, rows=tuple(_cast_row(row, to) for row in rows.rows if row is not None))


def _cast_row(row: _Row, to: str) -> _Row:
    """Cast `row`; an fp16 row that is cast back to fp16 is the row itself."""
    own = _FLOAT_NAMES.get(row.source.dtype, "")
    if row.casts == ("fp32",) and to == "fp16" and own == "fp16":
        return replace(row, casts=())
    if (row.casts[-1] if row.casts else own) == to:
        return row
    return replace(row, casts=(*row.casts, to))


def _read_slice_indices(op: Operation, axis: int) -> list[int] | None:
    """Return the indices along `axis` that a slice_by_index reads, if it reads all of every other axis; else None."""
    rank, size = op.x.rank, op.x.shape[axis]
    begin, end = get_const_value(op.begin), get_const_value(op.end)
    if begin is None or end is None or is_symbolic(size) or any(get_const_value(op.squeeze_mask) or ()):
        return None
    from_front, to_end = (get_const_value(mask) or [False] * rank for mask in (op.begin_mask, op.end_mask))
    stride = get_const_value(op.stride) or [1] * rank
    for each in range(rank):
        has_all_in_front = from_front[each] or begin[each] == 0
        has_all_behind = to_end[each] or end[each] == op.x.shape[each]
        if each != axis and not (stride[each] == 1 and has_all_in_front and has_all_behind):
            return None
    first, last = (None if masked[axis] else indices[axis] + int(size) * (indices[axis] < 0)
                   for indices, masked in ((begin, from_front), (end, to_end)))
    return list(range(int(size))[first:last:stride[axis]])


def _is_axis_dropped(op: Operation | None) -> bool:
    """Return whether a read returns one row without the axis."""
    if op is None:
        return False
    return op.op_type in ("list_read", "squeeze") or (op.op_type == "gather" and op.indices.rank == 0)


def _count_single_reads(single: Iterable[tuple[int, _Row]]) -> Counter[tuple[Var, int]]:
    """Count the rows of each value that are read one by one along each axis."""
    return Counter((row.source, axis) for axis, row in dict.fromkeys(single) if row.place is not None)


def _collect_single_rows(reads: Iterable[_Rows]) -> Sequence[tuple[int, _Row]]:
    """Collect the rows that are read one by one, each with its axis."""
    return [(rows.axis, rows.rows[0]) for rows in reads if len(rows.rows) == 1 and rows.rows[0] is not None]


class _RowValueBuilder:
    """A builder of the values that readers need.

    `single` are the rows read one by one: a source of several is split. `replacements` has the new values of replaced
    ones.
    """

    def __init__(self, mb: RewriteBuilder, single: Iterable[tuple[int, _Row]], replacements: Mapping[Var, Var]) -> None:
        self._mb, self._replacements = mb, replacements
        self._single_read_counts = _count_single_reads(single)
        self._memo: dict[Any, Var] = {}

    def build_bare_row(self, row: _Row, axis: int) -> Var:
        """Return `row` without the axis."""
        def build_row() -> Var:
            if row.bare:
                return self._apply_casts(row, self._find_replacement(row.source))
            return self._apply_casts(row, self._mb.squeeze(x=self._read_row(row, axis), axes=[axis]))

        return self._build_once(("bare", row, axis), build_row)

    def build_row(self, row: _Row, axis: int) -> Var:
        """Return `row` with an extent of 1 at the axis."""
        return self._build_once(("row", row, axis), lambda: self._apply_casts(row, self._read_row(row, axis)))

    def join_rows(self, rows: Sequence[_Row], axis: int) -> Var:
        """Join all of `rows` in order along the axis."""
        if len(rows) > 1 and all(row.bare for row in rows):
            return self._mb.stack(values=[self.build_bare_row(row, axis) for row in rows], axis=axis)
        runs = ([row for _, row in run] for _, run in groupby(enumerate(rows), _make_run_key))
        pieces = [piece for run in runs for piece in self._build_run(run, axis)]
        return pieces[0] if len(pieces) == 1 else self._mb.concat(values=pieces, axis=axis)

    def _build_run(self, rows: Sequence[_Row], axis: int) -> list[Var]:
        """Build rows that follow one another in their source, as one value where possible."""
        first = rows[0]
        if first.place is None or len(rows) == 1:
            return [self.build_row(row, axis) for row in rows]
        if len(rows) == first.source.shape[axis]:
            return [self._apply_casts(first, self._find_replacement(first.source))]
        return [self._apply_casts(first, self._slice_rows(first.source, first.place, len(rows), axis))]

    def _read_row(self, row: _Row, axis: int) -> Var:
        if row.bare:
            return self._mb.expand_dims(x=self._find_replacement(row.source), axes=[axis])
        if row.place is None:
            return self._find_replacement(row.source)
        if self._single_read_counts[row.source, axis] < 2:
            return self._slice_rows(row.source, row.place, 1, axis)
        return self._split_rows(row.source, axis)[row.place]

    def _split_rows(self, source: Var, axis: int) -> list[Var]:
        def build_split() -> Any:
            x = self._find_replacement(source)
            with self._mb.at(self._mb.find_insertion_point(x), source.name):
                return list(self._mb.split(x=x, num_splits=int(source.shape[axis]), axis=axis))

        parts: list[Var] = self._mb.once(("rows", source, axis), build_split)
        return parts

    def _slice_rows(self, source: Var, begin: int, count: int, axis: int) -> Var:
        free = [each != axis for each in range(source.rank)]
        first, last = ([0 if masked else place for masked in free] for place in (begin, begin + count))
        made: Var = self._mb.slice_by_index(
            x=self._find_replacement(source), begin=first, end=last, begin_mask=free, end_mask=free
        )
        return made

    def _apply_casts(self, row: _Row, var: Var) -> Var:
        for dtype in row.casts:
            var = self._mb.cast(x=var, dtype=dtype)
        return var

    def _build_once(self, key: Any, make: Any) -> Var:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def _find_replacement(self, var: Var) -> Var:
        return self._replacements.get(var, var)


def _make_run_key(numbered: tuple[int, _Row]) -> Any:
    """Return a key that is equal for rows that follow one another in their source."""
    number, row = numbered
    return (None, number) if row.place is None else (row.source, row.casts, row.place - number)


def _build_row_writes(x: Var) -> Var:
    rows = Builder.fill(shape=[3, 8], value=np.float16(0))
    for step in range(2):
        row = Builder.gather(x=x, indices=np.array([step], np.int32), axis=0)
        before = Builder.gather(x=rows, indices=np.array([step], np.int32), axis=0)
        rows = Builder.scatter(data=rows, indices=np.array([step + 1], np.int32), axis=0, mode="add",
                               updates=Builder.tanh(x=Builder.add(x=row, y=before)))
    result: Var = Builder.slice_by_index(x=rows, begin=[1, 0], end=[3, 8], name="y")
    return result


def _build_list_writes(x: Var) -> Var:
    rows = Builder.make_list(init_length=2, dynamic_length=False, elem_shape=(2, 3), dtype="fp16")
    rows = Builder.list_write(ls=rows, index=np.int32(0), value=x)
    first = Builder.list_read(ls=rows, index=np.int32(0))
    rows = Builder.list_write(ls=rows, index=np.int32(1), value=Builder.relu(x=first))
    result: Var = Builder.list_gather(ls=rows, indices=np.array([0, 1, 0], np.int32), name="y")
    return result


def _build_list_scatter(x: Var) -> list[Var]:
    rows = Builder.make_list(init_length=2, dynamic_length=False, elem_shape=(3,), dtype="fp16")
    rows = Builder.list_scatter(ls=rows, indices=np.array([1, 0], np.int32), value=x)
    return [Builder.list_gather(ls=rows, indices=np.array([0, 1], np.int32), name="y"),
            Builder.list_read(ls=rows, index=np.int32(1), name="z")]


def _build_computed_scatter(x: Var) -> Var:
    first = Builder.slice_by_size(x=x, begin=[0, 0], size=[1, 3])
    place = Builder.cast(x=Builder.reduce_max(x=first, axes=[1]), dtype="int32")
    result: Var = Builder.scatter(data=x, indices=place, updates=first, axis=0, name="y")
    return result
