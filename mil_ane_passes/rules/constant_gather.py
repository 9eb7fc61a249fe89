"""Find gathers at constant indices, on generations before the M4."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, types

from ..ane.op_support import BEFORE_M4, find_dynamic_inputs
from ..passes.contract import Example, Hit, Miss, Rule, Vendor
from ..passes.evidence import cite_2020_layer_list, cite_m4_study, cite_private_route
from ..passes.examples import make_example


class ConstantGather(Rule):
    """Before the M4 nobody saw a gather at constant indices on the ANE.

    why     Sources disagree. In 2020 gather was listed among the layers that leave the ANE; comments of Apple's say
            that it resides there, and on an M4 it is accepted. What decides, the chip or the system, nobody says.
    when    gather, gather_nd and gather_along_axis of numbers with constant indices, on generations before the M4.
    fix     Slices and a concat give the same bits; one slice_by_index does where the places are evenly apart. For many
            places, a matmul with a constant matrix of zeros and ones: exact where all values are finite.
    """

    code, slug = "ANE220", "constant-gather"
    roots = ("gather", "gather_nd", "gather_along_axis")
    targets = BEFORE_M4
    refuses, confidence, level = True, "low", "note"
    advice = "Slice and concat: the same bits; a matmul with a constant matrix of zeros and ones for many places."
    evidence = (
        cite_2020_layer_list("gather does not run on the ANE"),
        Vendor("contradicts it: scatter falls off the ANE, while gather resides there",
               source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"),
        cite_m4_study("contradicts it: gather with constant indices is accepted", rows=True),
        cite_private_route("contradicts it: gather is taken in a narrow form on M1, and by the hardware from M2 on"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if find_dynamic_inputs(op, "indices"):
            return Miss(op, "its indices are computed", near=False)
        if not types.is_float(op.x.dtype):
            return Miss(op, "gathers integers", near=False)
        return Hit(op, note=f"{op.op_type} at constant indices is accepted on M4; on earlier chips sources disagree",
                   sure=False)

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "channels", lambda x: Builder.gather(x=x, indices=np.array([2, 0], np.int32), axis=1, name="y"), x=(1, 3, 4)
        )
        yield make_example(
            "places", lambda x: Builder.gather_nd(x=x, indices=np.array([[0, 1]], np.int32), name="y"), x=(3, 4)
        )
        yield make_example(
            "computed",
            lambda ids: Builder.gather(x=np.ones((3, 4), np.float16), indices=ids, axis=0, name="y"),
            reason="its indices are computed",
            dtype=types.int32,
            ids=(2,),
        )
        yield make_example(
            "slice", lambda x: Builder.slice_by_size(x=x, begin=[1, 0], size=[1, 4], name="y"), reason="", x=(3, 4)
        )
