"""Slice at constant indices where computed ones are equal to constants."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var
from coremltools.converters.mil.mil.ops.defs._utils import solve_slice_by_index_shape

from ...ir.builder import RewriteBuilder
from ...ir.query import is_const, is_symbolic
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import build_program
from ...rules.runtime_slice import RuntimeSlice
from ..constants._shape_arithmetic import fold_slice_parameters, read_shape_numbers

_SLICE_INPUTS = {"slice_by_index": ("begin", "end"), "slice_by_size": ("begin", "size")}


class KnownSlice(Rewrite):
    """Count from the end of an axis where a slice's place is worked out of the axis' own size.

    why     Of `x[:, :x.shape[1] - 1]` with a flexible axis coremltools makes a slice whose end is computed: shape,
            casts, gather, sub and concat of int32, all off the ANE, and the slice with them.
    when    slice_by_index (forwards) and slice_by_size whose begin, end and size are constants, the size of the axis
            that is sliced, or such a size and a constant; and the shape of the result stays as known as it was. Not
            where a short axis makes the computed number negative, which means another place or size: `size - 3` of
            an axis of 2 is -1. State the shortest length of the flexible axes as `shortest` to allow it.
    exact   bitwise for all axes of `shortest` or more: begin and end are the same places.
    cost    none: one slice as before; the ops that work its place out go where nothing else reads them.

    before
        %0: int32[2] = shape(x=%x)
        %1: int32 = gather(x=%0, indices=1)
        %2: int32 = sub(x=%1, y=1)
        %3: int32[2] = concat(values=(4, %2), axis=0)
        %y: fp16[4, s0] = slice_by_index(x=%x, begin=[0, 0], end=%3, end_mask=[True, False])
    after
        %y: fp16[4, s0] = slice_by_index(x=%x, begin=[0, 0], end=[0, -1], end_mask=[True, False])
    """

    fixes = (RuntimeSlice,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    confidence = "high"
    roots = tuple(_SLICE_INPUTS)

    shortest: int = 1
    "The smallest extent of a flexible axis."

    def match(self, op: Operation) -> Hit | Miss:
        names = _SLICE_INPUTS[op.op_type]
        if all(is_const(op.inputs[name]) for name in names):
            return Miss(op, "its place is constant", near=False)
        first, second = (read_shape_numbers(op.inputs[name]) for name in names)
        if first is None or second is None:
            return Miss(op, "its place is not worked out of shapes")
        found = fold_slice_parameters(op, first, second, self.shortest)
        if isinstance(found, str):
            return Miss(op, found)
        try:
            shape = solve_slice_by_index_shape(op.x.shape, found["begin"], found["end"], found["stride"],
                                               found["begin_mask"], found["end_mask"], found["squeeze_mask"])
        except ValueError:  # coremltools rejects a slice that ends before it begins
            return Miss(op, f"nothing lies from {found['begin']} to {found['end']}")
        if [is_symbolic(size) for size in shape] != [is_symbolic(size) for size in op.outputs[0].shape]:
            return Miss(op, "what it gives would be of known size, where its readers do not know it")
        return Hit(op, note=f"{' and '.join(names)} are known: from {found['begin']} to {found['end']}", found=found,
                   smallest_size=self.shortest)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        plain = {"stride": 1, "begin_mask": False, "end_mask": False, "squeeze_mask": False}
        given = {name: values for name, values in hit.found.items()
                 if name not in plain or any(each != plain[name] for each in values)}
        built: Var = mb.slice_by_index(x=hit.op.x, **given)
        return built

    def examples(self) -> Iterable[Example]:
        yield Example("all but the last", lambda: _build_slice_by_index(1, (4, None)))
        yield Example("to the end", lambda: _build_slice_by_index(0, (4, None)))
        yield Example("by size", lambda: _build_slice_by_size((None, None), 2))
        yield Example("by size, of a long axis", lambda: _build_slice_by_size((None, None), 3), options={"shortest": 3})
        yield Example("by size, of any axis", lambda: _build_slice_by_size((None, None), 3),
                      reason="at size 2 its size is -1, which means all that is left (shortest=1)")
        yield Example(
            "all but the last three of a long axis",
            lambda: _build_slice_by_index(3, (4, None)),
            options={"shortest": 3},
        )
        yield Example("all but the last three", lambda: _build_slice_by_index(3, (4, None)),
                      reason="at size 2 its end is below 0, which counts from the end again (shortest=1)")
        yield Example("another axis", lambda: _build_slice_by_index(1, (None, 6), axis=0))
        yield Example("of another size", lambda: _build_slice_by_index(1, (None, None), axis=0, of=1),
                      reason="the size of another axis is part of it")
        yield Example(
            "half",
            lambda: _build_slice_by_index(0, (4, None), half=True),
            reason="its place is not worked out of shapes",
        )
        yield Example("fixed", lambda: build_program(
            lambda x: Builder.slice_by_index(x=x, begin=[0, 0], end=[4, 2], name="y"), x=(4, 6)),
            reason="its place is constant")


def _build_slice_by_index(
    less: int, shape: tuple[int | None, ...], axis: int = 1, of: int | None = None, half: bool = False
) -> Program:
    def body(x: Var) -> Var:
        size = Builder.gather(x=Builder.shape(x=x), indices=np.int32(axis if of is None else of), axis=0)
        end = Builder.floor_div(x=size, y=np.int32(2)) if half else Builder.sub(x=size, y=np.int32(less))
        ends = [end if each == axis else np.int32(shape[each] or 0) for each in range(2)]
        result: Var = Builder.slice_by_index(x=x, begin=[0, 0], end=Builder.concat(values=ends, axis=0),
                                             end_mask=[each != axis for each in range(2)], name="y")
        return result

    return build_program(body, x=shape)


def _build_slice_by_size(shape: tuple[int | None, ...], less: int) -> Program:
    def body(x: Var) -> Var:
        size = Builder.sub(x=Builder.shape(x=x), y=np.array([0, less], np.int32))
        result: Var = Builder.slice_by_size(x=x, begin=[0, 1], size=size, name="y")
        return result

    return build_program(body, x=shape)
