"""Pass rows that are written and read at constant indices directly from op to op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Var

from ...ir.builder import RewriteBuilder
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_m4_study, cite_private_route
from ...passes.examples import build_program
from ...rules.control_flow import ControlFlow
from ...utils.text_format import format_count
from . import _stored_row_examples as examples
from ._stored_row_reads import RowReads, collect_single_rows, is_axis_dropped
from ._stored_row_values import RowValueBuilder
from ._stored_rows import WRITE_OPS


class ListsAsStack(BlockRewrite):
    """Hand values on directly where they go through a list, or through rows of a tensor, at known places.

    why     list ops and scatter are unsupported on the ANE. The loop of a torch GRU writes each state into a row of
            one tensor and reads it back in the next step: written out, that is a chain of scatters and gathers at
            known places.
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
    fixes = (ControlFlow,)
    stage = "structure"
    after = ("unroll_while_loop", "fold_constants")
    exactness = Exactness.ROUNDING
    bound = "none but the sign of a zero, where a scatter adds to zeros"
    preset = "full"
    evidence = (
        cite_m4_study("scatter and scatter_along_axis are unsupported"),
        cite_private_route("the list ops and scatter have no form on any generation"),
    )

    max_parts: int = 1024
    "The most rows of one list or tensor."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not any(op.op_type in WRITE_OPS for op in block.operations):
            return
        reads = RowReads(block, self.max_parts)
        found = reads.replaced()
        yield from reads.misses
        if found:
            adds = any(op.op_type == "scatter" for op in reads.write_ops)
            count = len(reads.write_ops)
            yield Hit(reads.write_ops[0], note=f"{format_count(count, 'op')} that write rows", covers=reads.write_ops,
                      exactness=None if adds else Exactness.BITWISE, found=found, needed=reads.needed(found))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        made, taken = dict[Var, Var](), set[Var]()
        values = RowValueBuilder(mb, collect_single_rows(hit.found[var] for var in hit.found), made)
        for op in list(mb.block.operations):
            old = op.outputs[0] if op.outputs else None
            if old is not None and old in hit.needed:
                rows = hit.found[old]
                with mb.at(op):
                    new = (
                        values.bare(rows.rows[0], rows.axis)
                        if is_axis_dropped(op)
                        else values.join_rows(rows.rows, rows.axis)
                    )
                    made[old] = mb.identity(x=new) if old.consuming_blocks and new in taken else new
                    taken.add(new)
        return made

    def examples(self) -> Iterable[Example]:
        yield Example("written and read back", examples.build_row_writes)
        yield Example("a list", examples.build_list_writes)
        yield Example("scattered and gathered list", examples.build_list_scatter)
        yield Example("turned", lambda: examples.build_row_writes(lambda x: Builder.reverse(x=x, axes=[0])))
        yield Example(
            "by a computed place", examples.build_computed_scatter, reason="its indices are known only at run time"
        )
        yield Example("adds to values", lambda: build_program(lambda x: Builder.scatter(
            data=x, indices=np.array([1], np.int32), updates=np.ones((1, 3), np.float16), axis=0, name="y"), x=(2, 3)),
            reason="it adds to what may not be zero")
        yield Example("plain", lambda: build_program(lambda x: Builder.relu(x=x, name="y"), x=(2, 3)), reason="")
