"""Move slices that begin inside the last axis to another axis."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_used
from ...passes.contract import Community, Exactness, Example, Hit, Measured, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler_quirk
from ...passes.examples import make_example
from ...passes.targets import Gate

_SLICE_OPS = ("slice_by_index", "slice_by_size", "split")
_NEUTRAL_PARAMETERS: dict[str, Any] = {
    "begin": 0, "end": 1, "stride": 1, "size": 1, "begin_mask": False, "end_mask": False, "squeeze_mask": False,
}
"Per-axis parameters, with the value that selects all of an axis of one element."


class LastAxisSlice(Rewrite):
    """Transpose the last axis away before slicing it, so that values above 4094 do not become infinite.

    why     On M1 and M2 a slice that begins inside the last axis is copied through a fixed-point format with 4
            fractional bits: |x| > 4094 becomes infinite. A concat of several such slices, as in a gather, is reported
            to return wrong elements there. Offsets on other axes are correct, as is an M4.
    when    slice_by_index, slice_by_size with constant parameters and split, of fp16 values, that read elements from
            inside the last axis. The axis is swapped with the last axis that is read from its start; a value of rank 1
            becomes a column. For split the fault is predicted, not reported.
    exact   bitwise: elements are moved, none is computed with.
    cost    two transposes, each a pass over the data: often one if an index drops the last axis; for a split one, and
            one per part; for a vector expand_dims and squeeze. Useful only if values exceed 4094 or slices are
            concatenated again, therefore only by name.
    undone  by coremltools' `common::reduce_transposes`, for split. In `ane.pipeline()` this pass runs after it.

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
    roots = _SLICE_OPS
    targets = Gate(first="a14", last="m2")
    evidence = (
        Measured(
            "values above 4094.1 become infinite (not through Core ML)",
            chip="M2 Pro",
            os="macOS 26.5.2",
            source="https://github.com/sbryngelson/ANEForge/pull/145",
            date="2026-08-01",
        ),
        Measured(
            "the same at 4094 (not through Core ML)",
            chip="M1",
            os="macOS 15.6.1",
            source="https://github.com/sbryngelson/ANEForge/pull/267",
            date="2026-09-12",
        ),
        Measured(
            "no such limit (not through Core ML)",
            chip="M4",
            os="macOS 26.2",
            source="https://github.com/sbryngelson/ANEForge/pull/195",
            date="2026-08-06",
        ),
        Community(
            "all generations before M4 are affected; M3 has not been measured",
            source="sbryngelson/ANEForge docs/numeric-cliffs.md",
            date="2026",
        ),
        Community(
            "contradicts it: M1 only, and from M2 on there is no fault",
            source="sbryngelson/ANEForge docs/cross-chip.md",
            date="2026",
        ),
        cite_ane_compiler_quirk(
            "a gather on the last axis, made of such slices and a concat, returns wrong elements on the M1 "
            "and M2 generations; transposing the axis away and back is correct on all"
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "does not move floating-point numbers", near=False)
        if op.x.rank == 0 or (op.op_type == "split" and int(op.axis.val) % op.x.rank != op.x.rank - 1):
            return Miss(op, "splits another axis", near=False)
        if op.op_type == "split" and not any(is_used(part) for part in op.outputs[1:]):
            return Miss(op, "only the first part is used", near=False)
        start = read_slice_start(op)
        if start is None:
            return Miss(op, "begin or end is not constant")
        if not has_offset(start, op.x.rank - 1):
            return Miss(op, "begins at the front of the last axis", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, "computed in fp32, off the ANE; the fault is in fp16 only")
        if op.x.rank == 1 and op.outputs[0].rank == 0:
            return Miss(op, "reads one element of a vector: no axis is left to slice")
        partner = _find_swap_axis(start, op.x.rank)
        if partner is None:
            return Miss(op, "every axis is sliced from inside: none can be swapped with the last")
        return Hit(op, note=f"begins inside the last axis; sliced as axis {partner}", partner=partner)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Any:
        if hit.op.x.rank == 1:
            return _slice_as_column(mb, hit.op)
        return _slice_with_swapped_axes(mb, hit.op, hit.partner)

    def examples(self) -> Iterable[Example]:
        inner = _make_slice_example
        yield inner("slice", begin=[0, 0, 2], end=[2, 4, 5])
        yield inner("from the end", begin=[0, 0, -3], end=[0, 0, 0], begin_mask=[True, True, False],
                    end_mask=[True, True, True])
        yield inner("every second", begin=[0, 0, 1], end=[2, 4, 8], stride=[1, 1, 2])
        yield inner("one element", begin=[0, 0, 3], end=[2, 4, 4], squeeze_mask=[False, False, True])
        yield inner("other axis inside, too", begin=[0, 1, 2], end=[2, 3, 5])
        yield inner("first axis dropped", begin=[1, 0, 2], end=[2, 4, 5], squeeze_mask=[True, False, False])
        yield make_example("by size", lambda x: Builder.slice_by_size(x=x, begin=[0, 1, 2], size=[2, -1, 5], name="y"),
                           x=(2, 4, 8))
        yield make_example("split", partial(_build_split, sizes=[3, 5], axis=-1), x=(2, 4, 8))
        yield make_example("vector", lambda x: Builder.slice_by_index(x=x, begin=[2], end=[5], name="y"), x=(8,))
        yield inner("front", begin=[0, 1, 0], end=[2, 4, 5], reason="begins at the front of the last axis")
        yield inner("all inside", begin=[1, 1, 2], end=[2, 4, 5],
                    reason="every axis is sliced from inside: none can be swapped with the last")
        yield make_example("split of another axis", partial(_build_split, sizes=[1, 3], axis=1), x=(2, 4, 8),
                           reason="splits another axis")
        yield make_example("runtime begin", _build_computed_slice, x=(8,), reason="begin or end is not constant")
        yield inner("fp32", begin=[0, 0, 2], end=[2, 4, 5], dtype=types.fp32,
                    reason="computed in fp32, off the ANE; the fault is in fp16 only")


def read_slice_start(op: Operation) -> _SliceStart | None:
    """Return where `op` begins on each axis; None where that is dynamic.

    A split counts as beginning inside its axis.
    """
    rank = op.x.rank
    if op.op_type == "split":
        axis = int(op.axis.val) % rank
        return _SliceStart([int(number == axis) for number in range(rank)], [1] * rank)
    begin, end = get_const_value(op.begin), get_const_value(op.end if op.op_type == "slice_by_index" else op.size)
    if begin is None or end is None:
        return None
    if op.op_type == "slice_by_size":
        return _SliceStart(begin, [1] * rank)
    masked = get_const_value(op.begin_mask) or [False] * rank
    squeezed = get_const_value(op.squeeze_mask) or [False] * rank
    begin = [0 if free and not dropped else first for first, free, dropped in zip(begin, masked, squeezed)]
    return _SliceStart(begin, get_const_value(op.stride) or [1] * rank)


class _SliceStart(NamedTuple):
    """The first index and the stride of a slice on each axis."""

    begin: list[int]
    stride: list[int]


def has_offset(start: _SliceStart, axis: int) -> bool:
    """Return whether the slice does not begin at the front of `axis`; a backward slice begins at the end."""
    return bool(start.begin[axis] != 0 or start.stride[axis] < 0)


def _find_swap_axis(start: _SliceStart, rank: int) -> int | None:
    """Return the axis nearest to the last that is read from its front; 0 for a vector, which becomes a column."""
    if rank == 1:
        return 0
    return next((axis for axis in reversed(range(rank - 1)) if not has_offset(start, axis)), None)


def _slice_as_column(mb: RewriteBuilder, op: Operation) -> Var | list[Var]:
    """Compute the outputs of `op`, which slices a vector, on a column."""
    inputs = {name: var for name, var in op.inputs.items() if var is not None}
    inputs["x"] = mb.expand_dims(x=op.x, axes=[1])
    if op.op_type == "split":
        return [mb.squeeze(x=part, axes=[1]) for part in mb.split(**{**inputs, "axis": 0})]
    for name, neutral in _NEUTRAL_PARAMETERS.items():
        if name in inputs:
            inputs[name] = [*get_const_value(inputs[name]), neutral]
    column: Var = mb.squeeze(x=getattr(mb, op.op_type)(**inputs), axes=[1])
    return column


def _slice_with_swapped_axes(mb: RewriteBuilder, op: Operation, axis: int) -> Var | list[Var]:
    """Compute the outputs of `op` with the last axis and `axis` swapped."""
    rank = op.x.rank
    order = list(range(rank))
    order[axis], order[-1] = rank - 1, axis
    inputs = {name: var for name, var in op.inputs.items() if var is not None}
    inputs["x"] = mb.transpose(x=op.x, perm=order)
    if op.op_type == "split":
        parts = mb.split(**{**inputs, "axis": axis})
        return [mb.transpose(x=part, perm=order) for part in parts]
    for name in _NEUTRAL_PARAMETERS:
        if name in inputs:
            values = get_const_value(inputs[name])
            inputs[name] = [values[number] for number in order]
    sliced = getattr(mb, op.op_type)(**inputs)
    squeezed = inputs.get("squeeze_mask") or [False] * rank
    left = [number for number, gone in zip(order, squeezed) if not gone]
    back = [int(place) for place in np.argsort(left)]
    return sliced if back == sorted(back) else mb.transpose(x=sliced, perm=back)


def _make_slice_example(
    name: str, *, dtype: Any = types.fp16, reason: str | None = None, **parameters: Any
) -> Example:
    return make_example(name, lambda x: Builder.slice_by_index(x=x, name="y", **parameters), dtype=dtype,
                        reason=reason, x=(2, 4, 8))


def _build_split(x: Var, sizes: list[int], axis: int) -> Var:
    first, second = Builder.split(x=x, split_sizes=sizes, axis=axis)
    result: Var = Builder.concat(values=[second, first], axis=axis, name="y")
    return result


def _build_computed_slice(x: Var) -> Var:
    begin = Builder.cast(x=Builder.reduce_max(x=x, axes=[0], keep_dims=True), dtype="int32")
    result: Var = Builder.slice_by_size(x=x, begin=begin, size=[3], name="y")
    return result
