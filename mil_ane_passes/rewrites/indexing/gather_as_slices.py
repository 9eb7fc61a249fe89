"""Read constant indices by slices and a concat instead of a gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_const
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite, Vendor
from ...passes.evidence import cite_m4_study, cite_private_quirk
from ...passes.examples import build_program, make_example, make_weight
from ...passes.targets import Gate
from ...rules.indexing import ConstantGather
from ._constant_gathers import GATHER_OPS, build_gather_from_slices, plan_gather

_BEFORE_M4 = Gate(last="m3")
_LAST_AXIS_CONCAT_FAULT = Gate(first="a14", last="m2")


class GatherAsSlices(Rewrite):
    """Turn a gather at constant places into slices and a concat, or one slice, a reverse or a transpose.

    why     Before the M4 nobody saw a gather on the ANE through Core ML, while slices are taken everywhere; and what
            is one slice, or all of the axis, needs no gather on any chip.
    when    gather, gather_nd and gather_along_axis with constant indices. One slice, reverse or none: on every target.
            Where values have to be joined: on targets before the M4 only, which takes such a gather as it is, unless
            `always`. Places of several axes are taken axis by axis, or of the axes shown as one.
    exact   bitwise: elements are moved, none is computed with.
    cost    As many values are joined as there are runs of neighbours, `max_parts` at most. On M1 and M2, where joining
            slices of the last axis is reported to go wrong, two transposes, too.

    before
        %y: fp16[1, 5, 4] = gather(x=%x, indices=[4, 0, 1, 2, 3], axis=1)
    after
        %0: fp16[1, 4, 4], %1: fp16[1, 1, 4] = split(x=%x, split_sizes=[4, 1], axis=1)
        %y: fp16[1, 5, 4] = concat(values=(%1, %0), axis=1)
    """

    fixes = (ConstantGather,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    level, confidence = "note", "low"
    roots = GATHER_OPS
    evidence = (
        cite_m4_study(
            "by Core ML's estimates a gather moves 23 GB/s on the CPU (fitted to them), a slice 73 on the ANE",
            rows=True,
        ),
        Vendor(
            "contradicts it: gather resides on the ANE",
            source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py",
        ),
        cite_private_quirk(
            "slices of the last axis that are joined return wrong elements on the M1 and M2 generations; "
            "transposing the axis away and back is right on all"
        ),
    )

    always: bool = False
    "Join values also where a newer chip supports the gather."
    max_parts: int = 32
    "The most values that are joined."

    def match(self, op: Operation) -> Hit | Miss:
        if not is_const(op.indices):
            return Miss(op, "its indices are computed", near=False)
        if is_const(op.x):
            return Miss(op, "constant places of a constant: fold_constant_gather makes them a constant", near=False)
        plan = plan_gather(op)
        if isinstance(plan, str):
            return Miss(op, plan)
        if plan.parts > self.max_parts:
            return Miss(op, f"{plan.parts} values to join, above {self.max_parts}")
        if plan.parts > 1 and not self.always and not all(map(_BEFORE_M4.includes, self.generations)):
            return Miss(op, f"{plan.words()}: the gather is supported on M4; name an older target, or always=true")
        aside = any(map(_LAST_AXIS_CONCAT_FAULT.includes, self.generations))
        return Hit(op, note=f"{op.op_type} at {op.indices.val.size} constant places: {plan.words()}", plan=plan,
                   aside=aside)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return build_gather_from_slices(mb, hit.op, hit.plan, hit.aside)

    def examples(self) -> Iterable[Example]:
        join = {"always": True}
        yield Example("roll", lambda: _build_gather([4, 0, 1, 2, 3]), options=join)
        yield Example("last element", lambda: _build_gather(-1, axis=-1, opset=ct.target.iOS15))
        yield Example("every second", lambda: _build_gather([[0, 2], [4, 6]], axis=2))
        yield Example("flip", lambda: _build_gather([4, 3, 2, 1, 0]))
        yield Example("part of a flip", lambda: _build_gather([4, 3, 2]))
        yield Example("three of the last axis", lambda: _build_gather([0, 2, 1], axis=2), options=join)
        yield Example("repeats", lambda: _build_gather([0, 0, 1, 1, 2, 2]), options=join)
        yield Example("shuffle", lambda: _build_gather([0, 2, 4, 1, 3, 5], shape=(2, 6, 4)), options=join)
        yield Example("twice", lambda: _build_gather([1, 3, 1, 3]), options=join)
        yield make_example(
            "a mask for each head",
            lambda x: Builder.gather_nd(
                x=x,
                indices=np.stack(
                    np.broadcast_arrays(np.zeros((1, 1, 1, 1)), np.arange(8).reshape(1, 1, 1, 8)), -1
                ).astype(np.uint16),
                name="y",
            ),
            x=(1, 8),
        )
        yield make_example(
            "diagonal",
            lambda x: Builder.gather_nd(
                x=x, indices=np.repeat(np.arange(4), 2).reshape(4, 2).astype(np.int32), name="y"
            ),
            x=(4, 4, 3),
        )
        yield make_example(
            "along an axis",
            lambda x: Builder.gather_along_axis(x=x, indices=np.array([3, 0], np.int32), axis=0, name="y"),
            options=join,
            x=(4,),
        )
        yield Example(
            "scattered",
            lambda: _build_gather([0, 5, 3, 2, 6], shape=(1, 7, 4)),
            options=join | {"max_parts": 4},
            reason="5 values to join, above 4",
        )
        yield Example(
            "roll on M4",
            lambda: _build_gather([4, 0, 1, 2, 3]),
            reason="2 slices and a concat: the gather is supported on M4; name an older target, or always=true",
        )
        yield Example("outside", lambda: _build_gather([0, 5]), reason="place 5 is outside of the 5 there are")
        yield Example("symbolic", lambda: _build_gather([1, 2], shape=(2, None, 4)),
                      reason="it takes places of an axis of symbolic size")
        yield make_example(
            "a row for each batch",
            lambda x: Builder.gather(x=x, indices=np.array([[0], [1]], np.int32), axis=1, batch_dims=1, name="y"),
            reason="its places differ from batch to batch",
            x=(2, 4),
        )
        yield make_example(
            "table",
            lambda x: Builder.add(x=x, y=Builder.gather(x=make_weight(4, 3), indices=np.array([1], np.int32), axis=0)),
            reason="constant places of a constant: fold_constant_gather makes them a constant",
            x=(2, 3),
        )
        yield make_example(
            "computed",
            lambda i: Builder.gather(x=make_weight(4, 3), indices=i, axis=0, name="y"),
            reason="its indices are computed",
            dtype=types.int32,
            i=(2,),
        )


def _build_gather(indices: Any, axis: int = 1, shape: tuple[int | None, ...] = (1, 5, 4), opset: Any = ct.target.iOS17,
                  ) -> Program:
    shape = (1, 5, 8) if np.max(indices) == 6 and shape == (1, 5, 4) else shape
    return build_program(lambda x: Builder.gather(x=x, indices=np.array(indices, np.int32), axis=axis, name="y"),
                         opset=opset, x=shape)
