"""Move slices that begin inside the last axis to another axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_used
from ...passes.contract import Community, Exactness, Example, Hit, Measured, Miss, Rewrite
from ...passes.evidence import cite_private_quirk
from ...passes.examples import build_program, make_example
from ...passes.targets import Gate
from . import _constant_slices as slices


class LastAxisSlice(Rewrite):
    """Slice the last axis where it is not the last: two transposes keep values above 4094 from becoming infinite.

    why     On M1 and M2 a slice that begins inside the last axis is copied through a fixed-point format with 4 bits
            after the point: |x| > 4094 comes out infinite. A concat of several such slices, as a gather is made
            of, is said to return wrong elements there. An offset on any other axis is right, and so is an M4.
    when    slice_by_index, slice_by_size with constant parameters and split, of fp16 values, where something is read
            that does not begin at the front of the last axis. The axis changes places with the last one that is taken
            from its front; a value of rank 1 becomes a column. That split is struck is predicted, not reported.
    exact   bitwise: elements are moved, none is computed with.
    cost    two transposes, each a pass over the data: often one where an index drops the last axis; for a split one
            and one for each part; for a vector expand_dims and squeeze. Worth it only where values above 4094 occur or
            slices are joined again, hence only by name.
    undone  by coremltools' `common::reduce_transposes`, for split. In `ane.pipeline()` this pass stands after it.

    before
        %y: fp16[2, 4, 3] = slice_by_index(x=%x, begin=[0, 0, 2], end=[2, 4, 5])
    after
        %0: fp16[2, 8, 4] = transpose(x=%x, perm=[0, 2, 1])
        %1: fp16[2, 3, 4] = slice_by_index(x=%0, begin=[0, 2, 0], end=[2, 5, 4])
        %y: fp16[2, 4, 3] = transpose(x=%1, perm=[0, 2, 1])
    """

    code, slug = "ANE315", "last-axis-slice-offset"
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "named"
    roots = slices.SLICE_OPS
    targets = Gate(first="a14", last="m2")
    evidence = (
        Measured(
            "values above 4094.1 become infinite (private route)",
            chip="M2 Pro",
            os="macOS 26.5.2",
            source="https://github.com/sbryngelson/ANEForge/pull/145",
            date="2026-08-01",
        ),
        Measured(
            "the same at 4094 (private route)",
            chip="M1",
            os="macOS 15.6.1",
            source="https://github.com/sbryngelson/ANEForge/pull/267",
            date="2026-09-12",
        ),
        Measured(
            "no such limit (private route)",
            chip="M4",
            os="macOS 26.2",
            source="https://github.com/sbryngelson/ANEForge/pull/195",
            date="2026-08-06",
        ),
        Community(
            "all before the M4 generation are struck; M3 has not been measured",
            source="sbryngelson/ANEForge docs/numeric-cliffs.md",
            date="2026",
        ),
        Community(
            "at odds with it: M1 only, and from M2 on the way is clean",
            source="sbryngelson/ANEForge docs/cross-chip.md",
            date="2026",
        ),
        cite_private_quirk(
            "a gather on the last axis, made of such slices and a concat, returns wrong elements on the M1 "
            "and M2 generations; transposing the axis away and back is right on all"
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "moves no floating-point numbers", near=False)
        if op.x.rank == 0 or (op.op_type == "split" and int(op.axis.val) % op.x.rank != op.x.rank - 1):
            return Miss(op, "splits another axis", near=False)
        if op.op_type == "split" and not any(is_used(part) for part in op.outputs[1:]):
            return Miss(op, "only the part at the front is read", near=False)
        taken = slices.read_slice_start(op)
        if taken is None:
            return Miss(op, "begin or end is not constant")
        if not slices.has_offset(taken, op.x.rank - 1):
            return Miss(op, "begins at the front of the last axis", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, "computed in fp32, off the ANE: the fault is fp16's")
        if op.x.rank == 1 and op.outputs[0].rank == 0:
            return Miss(op, "takes one element of a vector: no axis is left to slice")
        partner = slices.find_swap_axis(taken, op.x.rank)
        if partner is None:
            return Miss(op, "every axis is sliced from inside: none can change places with the last")
        return Hit(op, note=f"begins inside the last axis; sliced as axis {partner}", partner=partner, taken=taken)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Any:
        return (
            slices.slice_as_column(mb, hit.op)
            if hit.op.x.rank == 1
            else slices.slice_with_swapped_axes(mb, hit.op, hit.partner)
        )

    def examples(self) -> Iterable[Example]:
        yield Example("slice", lambda: _build_slice(begin=[0, 0, 2], end=[2, 4, 5]))
        yield Example("from the end", lambda: _build_slice(
            begin=[0, 0, -3], end=[0, 0, 0], begin_mask=[True, True, False], end_mask=[True, True, True]))
        yield Example("every second", lambda: _build_slice(begin=[0, 0, 1], end=[2, 4, 8], stride=[1, 1, 2]))
        yield Example("one element", lambda: _build_slice(
            begin=[0, 0, 3], end=[2, 4, 4], squeeze_mask=[False, False, True]))
        yield Example("other axis inside, too", lambda: _build_slice(begin=[0, 1, 2], end=[2, 3, 5]))
        yield Example("first axis dropped", lambda: _build_slice(
            begin=[1, 0, 2], end=[2, 4, 5], squeeze_mask=[True, False, False]))
        yield make_example(
            "by size", lambda x: Builder.slice_by_size(x=x, begin=[0, 1, 2], size=[2, -1, 5], name="y"), x=(2, 4, 8)
        )
        yield Example("split", lambda: _build_split(-1))
        yield make_example("vector", lambda x: Builder.slice_by_index(x=x, begin=[2], end=[5], name="y"), x=(8,))
        yield Example(
            "front", lambda: _build_slice(begin=[0, 1, 0], end=[2, 4, 5]), reason="begins at the front of the last axis"
        )
        yield Example("all inside", lambda: _build_slice(begin=[1, 1, 2], end=[2, 4, 5]),
                      reason="every axis is sliced from inside: none can change places with the last")
        yield Example("split of another axis", lambda: _build_split(1), reason="splits another axis")
        yield Example("runtime begin", _build_computed_slice, reason="begin or end is not constant")
        yield Example("fp32", lambda: _build_slice(types.fp32, begin=[0, 0, 2], end=[2, 4, 5]),
                      reason="computed in fp32, off the ANE: the fault is fp16's")


def _build_slice(dtype: object = types.fp16, **parameters: object) -> Program:
    return build_program(lambda x: Builder.slice_by_index(x=x, name="y", **parameters), dtype=dtype, x=(2, 4, 8))


def _build_split(axis: int) -> Program:
    def body(x: Var) -> Var:
        first, second = Builder.split(x=x, split_sizes=[3, 5] if axis == -1 else [1, 3], axis=axis)
        result: Var = Builder.concat(values=[second, first], axis=axis, name="y")
        return result

    return build_program(body, x=(2, 4, 8))


def _build_computed_slice() -> Program:
    def body(x: Var) -> Var:
        begin = Builder.cast(x=Builder.reduce_max(x=x, axes=[0], keep_dims=True), dtype="int32")
        result: Var = Builder.slice_by_size(x=x, begin=begin, size=[3], name="y")
        return result

    return build_program(body, x=(8,))
