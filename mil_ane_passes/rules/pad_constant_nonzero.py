"""Find pads with a constant other than zero."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, types

from ..ir.query import get_const_value
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.examples import build_program


class PadConstantNonzero(Rule):
    """A pad with a constant that is not zero may not run on the ANE.

    why     Core ML holds a message that pads with other values than zero are not supported on the ANE. When it says
            so is not known: nobody published a model that was unsupported for it.
    when    pad with mode constant and a value that is not zero, or known only at run time.
    fix     concat constant blocks; or pad with zero and add a constant that holds the fill around -0.0. The same bits.
    """

    code, slug = "ANE226", "pad-constant-nonzero"
    roots = ("pad",)
    refuses, confidence = True, "medium"
    advice = "Concat constant blocks instead, or pad with zero and add a border of -0.0 around which the fill stands."
    evidence = (
        Community('a string in Core ML: "Constnt Pad fill mode with non-zero values is not supported on ANE"',
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md", date="2026"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if get_const_value(op.mode, "constant") != "constant":
            return Miss(op, "repeats values", near=False)
        if not types.is_float(op.x.dtype):
            return Miss(op, "no numbers", near=False)
        fill = (
            get_const_value(op.constant_val, 0.0)
            if op.constant_val is None or op.constant_val.val is not None
            else None
        )
        if fill == 0:
            return Miss(op, "pads with zero", near=False)
        what = "a value known at run time only" if fill is None else f"{fill:g}"
        return Hit(op, sure=False, note=f"pads with {what}; by a message in Core ML the ANE pads with zero only; no "
                                        "refusal was measured")

    def examples(self) -> Iterable[Example]:
        yield Example("ones", lambda: _build_pad("constant", 1.0))
        yield Example("a mask's filler", lambda: _build_pad("constant", -1e4))
        yield Example("zeros", lambda: _build_pad("constant", 0.0), reason="pads with zero")
        yield Example("reflect", lambda: _build_pad("reflect", 0.0), reason="repeats values")


def _build_pad(mode: str, fill: float) -> Program:
    return build_program(
        lambda x: Builder.pad(x=x, pad=[1, 1, 1, 1], mode=mode, constant_val=np.float16(fill), name="y"), x=(1, 2, 4, 4)
    )
