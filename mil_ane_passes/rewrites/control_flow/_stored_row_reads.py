"""Reads of written rows that are replaced, and those of them that need a value of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coremltools.converters.mil.mil import Block, ListVar, Operation, Var

from ...ir.query import get_const_value, get_consumers, is_const
from ...passes.contract import Miss
from ._stored_row_values import count_single_reads
from ._stored_rows import ROW_PRESERVING_OPS, WRITE_OPS, Row, Rows, RowTable

__all__ = ["RowReads", "collect_single_rows", "is_axis_dropped"]

_READ_OPS = frozenset({"gather", "list_read", "list_gather", "slice_by_index", "reverse", "squeeze"})


class RowReads:
    """The writes and reads of one block; `misses` lists the writes that are unknown, and why."""

    def __init__(self, block: Block, most: int) -> None:
        self.misses: list[Miss] = []
        self.write_ops: list[Operation] = []
        self._ops = list(block.operations)
        self._table, self._rows_by_read = RowTable(most), dict[Var, Rows]()
        for op in self._ops:
            if op.op_type in WRITE_OPS or op.op_type == "make_list":
                reason = self._table.write(op)
                if reason is not None:
                    self.misses.append(Miss(op, reason))
                elif op.op_type in WRITE_OPS:
                    self.write_ops.append(op)
            elif op.op_type in _READ_OPS:
                self._read(op)

    def _read(self, op: Operation) -> None:
        rows = self._find_rows(op)
        if rows is None:
            return
        self._rows_by_read[op.outputs[0]] = rows
        if is_axis_dropped(op) and rows.rows[0] is not None:
            self._table.bare[op.outputs[0]] = rows.rows[0]

    def _find_rows(self, op: Operation) -> Rows | None:
        if op.op_type == "squeeze":
            rows = self._rows_by_read.get(op.x)
            same = (
                rows is not None
                and len(rows.rows) == 1
                and get_const_value(op.axes) in ([rows.axis], [rows.axis - op.x.rank])
            )
            return rows if same and not is_axis_dropped(op.x.op) else None
        if op.op_type not in ("slice_by_index", "reverse"):
            return self._table.read(op)
        for axis in range(op.x.rank if op.x.rank == op.outputs[0].rank else 0):
            if op.op_type == "reverse" or op.x.shape[axis] != op.outputs[0].shape[axis]:
                rows = self._table.of(op.outputs[0], axis)
                if rows is not None and rows.written:
                    return rows
        return None

    def replaced(self) -> dict[Var, Rows]:
        """Return the values that are replaced, with their rows; nothing where a list is read at unknown indices."""
        found = {var: rows for var, rows in self._rows_by_read.items() if rows.written}
        for op in self._find_fully_read_writers(found):
            var = op.outputs[0]
            rows = None if isinstance(var, ListVar) else self._table.of(var, int(op.axis.val) % var.rank)
            if rows is None:
                self.misses.append(Miss(op, "it is read at places that are not known, or were not written to"))
                return {}
            found[var] = rows
        if found:
            found |= self._find_unwritten_reads(found)
        return found if len(self.write_ops) > 1 or any(var in self._rows_by_read for var in found) else {}

    def _find_fully_read_writers(self, found: Mapping[Var, Rows]) -> list[Operation]:
        """Return the writers whose output has a reader of the entire value rather than of rows."""
        done, whole = set(self.write_ops), dict[Var, bool]()
        for op in reversed(self._ops):
            for var in op.outputs:
                whole[var] = bool(var.consuming_blocks) or any(
                    reader not in done and not any(out in found for out in reader.outputs)
                    and (reader.op_type not in ROW_PRESERVING_OPS or whole.get(reader.outputs[0], True))
                    for reader in get_consumers(var))
        return [op for op in self.write_ops if whole[op.outputs[0]]]

    def _find_unwritten_reads(self, found: Mapping[Var, Rows]) -> dict[Var, Rows]:
        """Find reads of unwritten rows: of tensors that are read row by row, and of rows that come from elsewhere."""
        often = count_single_reads(collect_single_rows(self._rows_by_read.values()))
        beside = dict[Var, Rows]()
        for var, rows in self._rows_by_read.items():
            if var in found or len(rows.rows) != 1 or rows.rows[0] is None:
                continue
            source = rows.rows[0].source
            came = var.op.op_type == "gather" and source is not var.op.x
            if var.op.x in beside or came or (often.get((source, rows.axis), 0) > 1 and not is_const(source)):
                beside[var] = rows
        return beside

    def needed(self, found: Mapping[Var, Rows]) -> set[Var]:
        """Return the values of `found` with a reader that is not replaced itself."""
        done = set(self.write_ops)
        needed = {var for var in found if var.consuming_blocks or any(
            reader not in done and not any(out in found for out in reader.outputs) for reader in get_consumers(var))}
        pending = list(needed)
        while pending:
            for row in found[pending.pop()].rows:
                if row is not None and row.source in found and row.source not in needed:
                    needed.add(row.source)
                    pending.append(row.source)
        return needed


def is_axis_dropped(op: Operation | None) -> bool:
    """Return whether a read returns one row without the axis."""
    return op is not None and (op.op_type in ("list_read", "squeeze") or (op.op_type == "gather" and
                                                                          op.indices.rank == 0))


def collect_single_rows(reads: Iterable[Rows]) -> Sequence[tuple[int, Row]]:
    """Collect the rows that are read one by one, each with its axis."""
    return [(rows.axis, rows.rows[0]) for rows in reads if len(rows.rows) == 1 and rows.rows[0] is not None]
