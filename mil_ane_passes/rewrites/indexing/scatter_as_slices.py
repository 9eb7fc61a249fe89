"""Write constant indices by a select, or by slices and a concat, instead of a scatter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_const
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss, Vendor
from ...passes.evidence import cite_m1_gpt_notes, cite_m4_study
from ...passes.examples import build_program, make_weight
from ...rules.scatter import Scatter
from ._scatter_plans import build_scatter_plan, plan_scatter

_SCATTER_OPS = ("scatter", "scatter_nd", "scatter_along_axis")


class ScatterAsSlices(BlockRewrite):
    """Turn a scatter at constant places, such as an assignment to a slice, into a select, or slices and a concat.

    why     scatter is unsupported on the ANE, and coremltools makes one of each `x[..., -1] += 1` for targets before
            iOS18: of all elements in one row, between two reshapes.
    when    scatter, scatter_nd and scatter_along_axis with constant indices, each place once. One place of an axis, or
            a number for all places: a select with a constant mask. A window, evenly spaced along each axis, also where
            only the shape before a reshape shows it: the parts beside it and the new one, joined; zeros around an
            update of a constant of zeros: a pad. Other places of one axis: pieces, `max_parts` at most; a constant at
            other places: a select of it, within `max_bytes`. With `windows` slice_update, too.
    exact   rounding for max and min, which of two zeros may keep either; all else bitwise: elements are moved, and
            combined once, as before.
    cost    a select or a concat over all of the data; the bytes of a mask, and of an update spread over all places.

    before
        %0: fp16 = reduce_max(x=%x)
        %1: fp16[6] = mul(x=%0, y=[-0.6875, -0.25, 0.1875, 0.625, -0.375, 0.0625])
        %2: fp16[24] = reshape(x=%x, shape=[-1])
        %3: fp16[24] = scatter(data=%2, indices=[3, 7, 11, 15, 19, 23], updates=%1, mode=update)
        %y: fp16[2, 3, 4] = reshape(x=%3, shape=[-1, 3, 4])
    after
        %0: fp16 = reduce_max(x=%x)
        %1: fp16[6] = mul(x=%0, y=[-0.6875, -0.25, 0.1875, 0.625, -0.375, 0.0625])
        %2: fp16[2, 3, 1] = reshape(x=%1, shape=[2, 3, 1])
        %y: fp16[2, 3, 4] = select(cond=[[[False, False, False, True]]], a=%2, b=%x)
    """

    fixes = (Scatter,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "the same bits, but that max and min of two zeros may keep the sign of either"
    preset = "full"
    confidence = "high"
    roots = (*_SCATTER_OPS, "slice_update")
    evidence = (
        Vendor("scatter falls off the ANE; an assignment to a window may reside there",
               source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"),
        cite_m4_study("scatter is unsupported; select, concat, pad and slices are accepted"),
        cite_m1_gpt_notes("a scatter into a key and value cache is not supported; where with a mask runs on the ANE"),
    )

    max_parts: int = 32
    "The most values that are joined."
    max_bytes: int = 1 << 20
    "The most bytes of the new constants for one op: the mask, and an update extended to all indices."
    windows: bool = False
    "Rewrite slice_update at constant indices, too; no source reports whether it runs on the ANE."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type in _SCATTER_OPS or (op.op_type == "slice_update" and self.windows):
                yield self.match(op)

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type in _SCATTER_OPS and not is_const(op.indices):
            return Miss(op, "its indices are computed", near=False)
        plan = plan_scatter(op, self.max_parts, self.max_bytes)
        if isinstance(plan, str):
            return Miss(op, plan)
        exactness = None if plan.group.mode in ("max", "min") else Exactness.BITWISE
        return Hit(op, note=f"{op.op_type} to {len(plan.group.places)} constant places: {plan.words}",
                   exactness=exactness, plan=plan)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return build_scatter_plan(mb, hit.op, hit.plan)

    def examples(self) -> Iterable[Example]:
        yield Example("the last of each row", lambda: _build_flat_scatter(np.arange(3, 24, 4), (2, 3, 4)))
        yield Example(
            "added to the last of each row", lambda: _build_flat_scatter(np.arange(3, 24, 4), (2, 3, 4), "add")
        )
        yield Example("columns", lambda: _build_row_scatter([1, 2], axis=1))
        yield Example("rows, added", lambda: _build_row_scatter([1, 2], mode="add"))
        yield Example("every second column", lambda: _build_row_scatter([0, 2, 4], axis=1, mode="max"))
        yield Example("any rows", lambda: _build_row_scatter([3, 0, 1], mode="min", opset=ct.target.iOS15))
        yield Example("constants to several places", lambda: build_program(
            lambda x: Builder.scatter(data=x, indices=np.array([4, 1, 2], np.int32), updates=make_weight(3, 8), axis=0,
                                      mode="update", name="y"), x=(5, 8)))
        yield Example("a number", lambda: build_program(
            lambda x: Builder.scatter(data=x, indices=np.array([1, -1], np.int32), updates=np.zeros(2, np.float16),
                                      axis=0, mode="update", name="y"), opset=ct.target.iOS15, x=(5,)))
        yield Example("points", lambda: build_program(
            lambda x: Builder.scatter_nd(data=x, indices=np.array([[1, 2], [1, 3], [2, 2], [2, 3]], np.int32),
                                         updates=make_weight(4), mode="mul", name="y"), x=(4, 5)))
        yield Example(
            "constant points",
            lambda: build_program(
                lambda x: Builder.scatter_nd(
                    data=x,
                    indices=np.array([[1, 2], [3, 0], [2, 4]], np.int32),
                    updates=make_weight(3),
                    mode="sub",
                    name="y",
                ),
                x=(4, 5),
            ),
            options={"max_parts": 3},
        )
        yield Example("along an axis", lambda: build_program(
            lambda x: Builder.scatter_along_axis(data=x, indices=np.array([[1], [1], [1], [1]], np.int32), axis=1,
                                                 updates=make_weight(4, 1), mode="update", name="y"), x=(4, 5)))
        yield Example(
            "into zeros",
            lambda: build_program(
                lambda x: Builder.scatter(
                    data=np.zeros(5, np.float16),
                    indices=np.array([1, 2], np.int32),
                    mode="update",
                    updates=Builder.mul(x=Builder.reduce_max(x=x), y=make_weight(2)),
                    name="y",
                ),
                x=(3,),
            ),
        )
        yield Example("slice_update", _build_slice_update, options={"windows": True})
        yield Example("slice_update, as it is", _build_slice_update, reason="")
        yield Example("twice", lambda: _build_row_scatter([1, 1]),
                      reason="it writes to one place twice, and which one stays is not stated")
        yield Example("many", lambda: _build_row_scatter([0, 2, 3], mode="add"), options={"max_parts": 2},
                      reason="5 values to join, above 2")
        yield Example("integers", lambda: build_program(
            lambda x, v: Builder.scatter(data=x, indices=np.array([1], np.int32), updates=v, axis=0, mode="add"),
            dtype=types.int32, x=(3,), v=(1,)), reason="it computes on integers")
        yield Example("computed", lambda: build_program(
            lambda i: Builder.scatter(data=make_weight(4), indices=i, updates=make_weight(1), axis=0, name="y"),
            dtype=types.int32, i=(1,)), reason="its indices are computed")


def _build_flat_scatter(places: Any, shape: tuple[int, ...], mode: str = "update") -> Program:
    def body(x: Var) -> Var:
        updates = Builder.mul(x=Builder.reduce_max(x=x), y=make_weight(len(places)))
        line = Builder.reshape(x=x, shape=[-1])
        line = Builder.scatter(data=line, indices=np.array(places, np.int32), updates=updates, mode=mode)
        result: Var = Builder.reshape(x=line, shape=[-1, *shape[1:]], name="y")
        return result

    return build_program(body, x=shape)


def _build_row_scatter(places: list[int], axis: int = 0, mode: str = "update", opset: Any = ct.target.iOS17) -> Program:
    def body(x: Var) -> Var:
        size = [-1, -1]
        size[axis] = len(places)
        updates = Builder.relu(x=Builder.slice_by_size(x=x, begin=[0, 0], size=size))
        result: Var = Builder.scatter(data=x, indices=np.array(places, np.int32), updates=updates, axis=axis, mode=mode,
                                      name="y")
        return result

    return build_program(body, opset=opset, x=(4, 5))


def _build_slice_update() -> Program:
    return build_program(lambda x: Builder.slice_update(
        x=x, update=Builder.slice_by_size(x=x, begin=[0, 0], size=[2, -1]), begin=[1, 0], end=[3, 0],
        end_mask=[False, True], name="y"), opset=ct.target.iOS18, x=(4, 5))
