"""Find fill, and fill_like on generations before the M4."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route, cite_xcode_notes
from ..passes.examples import make_example
from ._unsupported_ops import BEFORE_M4, find_dynamic_inputs, format_chips, is_any_admitted, make_unsupported_hit


class Fills(Rule):
    """A tensor of one number is filled while the model runs.

    why     fill and fill_like were reported on the CPU only, chip not stated. Sources disagree: the ANE's compiler
            takes both when asked without Core ML, and on an M4 fill_like is accepted; fill was not tried there.
    when    Any fill of numbers; any fill_like of numbers on generations before the M4.
    fix     ane::constant_fill: a constant, of one element where what reads it broadcasts, and for a size known at run
            time zeros of that size and the number: the same bits. coremltools' const_elimination folds a fill whose
            shape is known at conversion, a fill_like never.
    """

    code, slug = "ANE206", "fill"
    roots = ("fill", "fill_like")
    refuses, confidence = True, "low"
    advice = "Put a constant in its place, of one element where its reader broadcasts: the same bits."
    evidence = (
        cite_xcode_notes("fill and fill_like run on the CPU only, with fixed shapes, too"),
        cite_m4_study("at odds with it: fill_like is accepted", rows=True),
        cite_private_route("at odds with it: fill and fill_like make constants on every generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.outputs[0].dtype):
            return Miss(op, "makes integers", near=False)
        if op.op_type == "fill_like":
            if not is_any_admitted(BEFORE_M4, tuple(self.generations)):
                return Miss(op, "fill_like is accepted on M4", near=False)
            return Hit(op, note="fill_like was reported on the CPU, and is accepted on M4", sure=False)
        how = "in a shape that is computed" if find_dynamic_inputs(op, "shape") else "in a fixed shape"
        if not is_any_admitted(BEFORE_M4, tuple(self.generations)):
            where = format_chips(tuple(self.generations))
            return Hit(op, note=f"fill {how} was reported on the CPU; not measured on {where}", sure=False)
        return make_unsupported_hit(self, op, f"fill {how} was reported on the CPU", seen=BEFORE_M4)

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "fill", lambda x: Builder.add(x=x, y=Builder.fill(shape=[2, 3], value=np.float16(1)), name="y"), x=(2, 3)
        )
        yield make_example(
            "fill_like", lambda x: Builder.fill_like(ref_tensor=x, value=np.float16(1), name="y"), x=(2, None)
        )
        yield make_example(
            "integers",
            lambda x: Builder.fill_like(ref_tensor=x, value=np.int32(1), name="y"),
            reason="makes integers",
            x=(2, None),
        )
        yield make_example("constant", lambda x: Builder.add(x=x, y=np.float16(1), name="y"), reason="", x=(2, 3))
