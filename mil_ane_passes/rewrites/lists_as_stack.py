"""Hand rows that are written and read at known places from one op to the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, ListVar, Operation, Program, Var

from ..core.build import RewriteBuilder
from ..core.contract import BlockRewrite, Community, Exactness, Example, Hit, Measured, Miss
from ..core.examples import program
from ..core.query import consumers, is_const
from ._written_values import Values, counted
from ._written_rows import CARRIES, WRITERS, Row, Rows, Table

_READS = frozenset({"gather", "list_read", "list_gather", "slice_by_index"})


class ListsAsStack(BlockRewrite):
    """Hand values on directly where they go through a list, or through rows of a tensor, at known places.

    why     The ANE takes no list op and no scatter. The loop of a torch GRU writes each state into a row of one tensor
            and reads it back in the next step: written out, that is a chain of scatters and gathers at known places.
    when    Chains of list_write and list_scatter, and of scatters (update, or add to rows of zeros) along one axis, at
            places that are known, all in one block. What is read row by row is split once; what is read as a whole
            becomes one stack or concat. A single scatter whose rows nobody reads one by one is not looked at.
    exact   rounding: each element is the one that was written; a -0.0 that was added to a zero stays -0.0. Lists are
            bitwise.
    cost    none: less is moved than before.

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
    stage = "structure"
    after = ("unroll_while_loop", "fold_constants")
    exactness = Exactness.ROUNDING
    bound = "none but the sign of a zero, where a scatter adds to zeros"
    preset = "full"
    evidence = (
        Measured("scatter and scatter_along_axis are refused", chip="M4", os="macOS 27.0.1", date="2026",
                 source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md"),
        Community("the list ops and scatter have no form on any generation (private route)", chip="M1 to M5",
                  date="2026", source="sbryngelson/ANEForge docs/op-catalog.md"),
    )

    max_parts: int = 1024
    "The most rows of one list or tensor."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not any(op.op_type in WRITERS for op in block.operations):
            return
        table, reads, writers = Table(self.max_parts), dict[Var, Rows](), list[Operation]()
        for op in block.operations:
            if op.op_type in WRITERS or op.op_type == "make_list":
                reason = table.write(op)
                if reason is not None:
                    yield Miss(op, reason)
                elif op.op_type in WRITERS:
                    writers.append(op)
            elif op.op_type in _READS:
                rows = _read(table, op)
                if rows is not None:
                    reads[op.outputs[0]] = rows
        found = _replaced(table, reads, writers, list(block.operations))
        if isinstance(found, Miss):
            yield found
        elif found and (len(writers) > 1 or isinstance(writers[0].outputs[0], ListVar)):
            adds = any(op.op_type == "scatter" for op in writers)
            yield Hit(writers[0], note=f"{len(writers)} op{'s' * (len(writers) != 1)} that write rows",
                      exactness=None if adds else Exactness.BITWISE, reads=found, covers=writers)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        made = dict[Var, Var]()
        values, taken = Values(mb, _single(hit.reads.values()), made), set[Var]()
        for op in list(mb.block.operations):
            rows = hit.reads.get(op.outputs[0]) if op.outputs else None
            if rows is not None:
                with mb.at(op):
                    bare = op.op_type == "list_read" or (op.op_type == "gather" and op.indices.rank == 0)
                    new = values.bare(rows.rows[0], rows.axis) if bare else values.joined(rows.rows, rows.axis)
                    returned = bool(op.outputs[0].consuming_blocks)
                    made[op.outputs[0]] = mb.identity(x=new) if returned and new in taken else new
                    taken.add(new)
        return made

    def examples(self) -> Iterable[Example]:
        yield Example("written and read back", _rows)
        yield Example("a list", _list)
        yield Example("scattered and gathered list", _scattered)
        yield Example("turned", lambda: _rows(lambda x: Builder.reverse(x=x, axes=[0])))
        yield Example("by a computed place", _computed, reason="its indices are known only at run time")
        yield Example("adds to values", lambda: program(lambda x: Builder.scatter(
            data=x, indices=np.array([1], np.int32), updates=np.ones((1, 3), np.float16), axis=0, name="y"), x=(2, 3)),
            reason="it adds to what may not be zero")
        yield Example("plain", lambda: program(lambda x: Builder.relu(x=x, name="y"), x=(2, 3)), reason="")


def _read(table: Table, op: Operation) -> Rows | None:
    """The rows that `op` reads; of slices those of what was written."""
    if op.op_type != "slice_by_index":
        return table.read(op)
    for axis in range(op.x.rank if op.x.rank == op.outputs[0].rank else 0):
        if op.x.shape[axis] != op.outputs[0].shape[axis]:
            rows = table.of(op.outputs[0], axis)
            return rows if rows is not None and rows.written else None
    return None


def _replaced(
    table: Table, reads: Mapping[Var, Rows], writers: list[Operation], ops: list[Operation]
) -> dict[Var, Rows] | Miss:
    """What is replaced, with its rows; a Miss where a list is read at places that are not known."""
    found = {var: rows for var, rows in reads.items() if rows.written}
    done, whole = set(writers), dict[Var, bool]()
    for op in reversed(ops):
        for var in op.outputs:
            whole[var] = bool(var.consuming_blocks) or any(
                reader not in done and not any(out in found for out in reader.outputs)
                and (reader.op_type not in CARRIES or whole.get(reader.outputs[0], True)) for reader in consumers(var))
    for op in writers:
        var = op.outputs[0]
        if not whole[var]:
            continue
        if isinstance(var, ListVar):
            return Miss(op, "the list is read at places that are not known, or that nothing was written to")
        rows = table.of(var, int(op.axis.val) % var.rank)
        if rows is not None:
            found[var] = rows
    often = counted(_single(reads.values())) if found else {}
    return found | {var: rows for var, rows in reads.items() if var not in found and len(rows.rows) == 1
                    and often.get((rows.rows[0].source, rows.axis), 0) > 1 and not is_const(rows.rows[0].source)}


def _single(reads: Iterable[Rows]) -> list[tuple[int, Row]]:
    return [(rows.axis, rows.rows[0]) for rows in reads if len(rows.rows) == 1 and rows.rows[0] is not None]


def _rows(first: Any = None) -> Program:
    def body(x: Var) -> Var:
        x = first(x) if first else x
        held = Builder.fill(shape=[3, 8], value=np.float16(0))
        for step in range(2):
            row = Builder.gather(x=x, indices=np.array([step], np.int32), axis=0)
            before = Builder.gather(x=held, indices=np.array([step], np.int32), axis=0)
            held = Builder.scatter(data=held, indices=np.array([step + 1], np.int32), axis=0, mode="add",
                                   updates=Builder.tanh(x=Builder.add(x=row, y=before)))
        result: Var = Builder.slice_by_index(x=held, begin=[1, 0], end=[3, 8], name="y")
        return result

    return program(body, x=(2, 8))


def _list() -> Program:
    def body(x: Var) -> list[Var]:
        held = Builder.make_list(init_length=2, dynamic_length=False, elem_shape=(2, 3), dtype="fp16")
        held = Builder.list_write(ls=held, index=np.int32(0), value=x)
        again = Builder.list_read(ls=held, index=np.int32(0))
        held = Builder.list_write(ls=held, index=np.int32(1), value=Builder.relu(x=again))
        return [Builder.list_gather(ls=held, indices=np.array([0, 1, 0], np.int32), name="y")]

    return program(body, x=(2, 3))


def _scattered() -> Program:
    def body(x: Var) -> list[Var]:
        held = Builder.make_list(init_length=2, dynamic_length=False, elem_shape=(3,), dtype="fp16")
        held = Builder.list_scatter(ls=held, indices=np.array([1, 0], np.int32), value=x)
        return [Builder.list_gather(ls=held, indices=np.array([0, 1], np.int32), name="y"),
                Builder.list_read(ls=held, index=np.int32(1), name="z")]

    return program(body, x=(2, 3))


def _computed() -> Program:
    def body(x: Var) -> Var:
        first = Builder.slice_by_size(x=x, begin=[0, 0], size=[1, 3])
        place = Builder.cast(x=Builder.reduce_max(x=first, axes=[1]), dtype="int32")
        result: Var = Builder.scatter(data=x, indices=place, updates=first, axis=0, name="y")
        return result

    return program(body, x=(2, 3))
