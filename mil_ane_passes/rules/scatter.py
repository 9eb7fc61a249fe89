"""Find scatters."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation

from ..passes.contract import Community, Example, Hit, Miss, Rule, Vendor
from ..passes.evidence import cite_m1_gpt_notes, cite_m4_study, cite_private_route
from ..passes.examples import make_example
from ._unsupported_ops import find_dynamic_inputs, make_unsupported_hit


class Scatter(Rule):
    """scatter is unsupported on the ANE.

    why     Apple's own comments in coremltools say it falls off the ANE. Core ML on an M4 rejects it, the ANE's
            compiler on M1 to M5 has no form of it, and those who moved caches by scatter found it rejected.
    when    scatter, scatter_nd and scatter_along_axis, with constant or computed indices.
    fix     A fixed window: slice_update (iOS18), or slices and a concat: the same bits. Chosen places: blend
            x * (1 - m) + v * m with a mask that is an input or a constant: exact where values are finite. Constant
            indices: a gather with the inverse ones.
    """

    code, slug = "ANE213", "scatter"
    roots = ("scatter", "scatter_nd", "scatter_along_axis")
    refuses, confidence = True, "high"
    advice = "Write a fixed window by slice_update or by slices and concat (same bits), chosen places by a mask."
    evidence = (
        Vendor(
            "scatter and scatter_nd fall off the ANE; an assignment to a window may reside there",
            source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py",
        ),
        cite_m4_study("scatter and scatter_along_axis are unsupported"),
        cite_private_route("scatter, scatter_nd and scatter_along_axis have no form on any generation"),
        cite_m1_gpt_notes(
            "a scatter into a key and value cache is not supported; where with a mask from outside runs on the ANE"
        ),
        Community(
            "a scatter into a cache is rejected by the ANE's compiler at any precision, of rank 5 and of rank 4",
            source="https://github.com/FluidInference/mobius/pull/67",
            date="2026-06-07",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        how = "computed" if find_dynamic_inputs(op, "indices") else "constant"
        return make_unsupported_hit(self, op, f"{op.op_type} is unsupported on the ANE (indices {how})")

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "rows",
            lambda x, v: Builder.scatter(data=x, indices=np.array([2], np.int32), updates=v, axis=0, name="y"),
            x=(4, 3),
            v=(1, 3),
        )
        yield make_example(
            "places",
            lambda x, v: Builder.scatter_nd(data=x, indices=np.array([[0, 1], [2, 2]], np.int32), updates=v, name="y"),
            x=(4, 3),
            v=(2,),
        )
        yield make_example(
            "along an axis",
            lambda x, v: Builder.scatter_along_axis(
                data=x, indices=np.array([[0, 1, 2]], np.int32), updates=v, axis=0, name="y"
            ),
            x=(4, 3),
            v=(1, 3),
        )
        yield make_example(
            "a window",
            lambda x, v: Builder.slice_update(x=x, update=v, begin=[2, 0], end=[3, 3], name="y"),
            reason="",
            opset=ct.target.iOS18,
            x=(4, 3),
            v=(1, 3),
        )
