"""Compute sinh and cosh from exp and tanh."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example, Hit
from ...passes.examples import make_op_example
from ._elementary_functions import LOOKUP_TABLE_EVIDENCE, ElementaryRewrite


class Hyperbolic(ElementaryRewrite):
    """Compute cosh from exp(|x| / 2), and sinh as tanh times cosh.

    why     Core ML on an M4 rejects sinh and cosh, and so does the ANE's compiler on M1 to M5 when queried without Core
            ML. exp and tanh are supported.
    when    sinh and cosh of fp16 values.
    exact   rounding: with e = exp(|x| / 2) and u = e / 2 * e, cosh x = u + 1 / (4 u) and sinh x = tanh x cosh x. Unlike
            in (exp(x) - exp(-x)) / 2 nothing cancels near 0, and nothing is infinite before the result is (exp is from
            11.1 on, sinh and cosh from 11.8). Over all fp16 numbers cosh is within 2.07 units in the last place
            (relative 1.7e-3), sinh within 3.27 (2.1e-3 of what is not subnormal). These numbers count rounding only: an
            error of the device's tanh adds to that of sinh.
    cost    seven ops for cosh, nine for sinh.

    before
        %y: fp16[2, 8] = cosh(x=%x)
    after
        %0: fp16[2, 8] = abs(x=%x)
        %1: fp16[2, 8] = mul(x=%0, y=0.5)
        %2: fp16[2, 8] = exp(x=%1)
        %3: fp16[2, 8] = mul(x=%2, y=0.5)
        %4: fp16[2, 8] = mul(x=%3, y=%2)
        %5: fp16[2, 8] = real_div(x=0.25, y=%4)
        %y: fp16[2, 8] = add(x=%4, y=%5)
    """

    bound = "2.07 units in the last place for cosh and 3.27 for sinh, over all fp16 numbers"
    roots = ("cosh", "sinh")
    forms = {"cosh": ("u + 1 / (4 u), u = exp(|x|) / 2", 2.07), "sinh": ("tanh(x) * cosh(x)", 3.27)}
    evidence = (*ElementaryRewrite.evidence, LOOKUP_TABLE_EVIDENCE)

    max_error: float = 4.0
    "Maximum accepted error in units in the last place; cosh is off by 2.07, sinh by 3.27."

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x, half = hit.op.x, np.float16(0.5)
        root = mb.exp(x=mb.mul(x=mb.abs(x=x), y=half))
        u = mb.mul(x=mb.mul(x=root, y=half), y=root)  # this order is finite whenever the result is
        result: Var = mb.add(x=u, y=mb.real_div(x=np.float16(0.25), y=u))
        if hit.op.op_type == "sinh":
            result = mb.mul(x=mb.tanh(x=x), y=result)
        return result

    def examples(self) -> Iterable[Example]:
        yield make_op_example("cosh", "cosh", (2, 8))
        yield make_op_example("sinh", "sinh", (2, 8))
        yield make_op_example("sinh near 0", "sinh", (2, 8), scale=0.01)
        yield make_op_example("cosh of large ones", "cosh", (2, 8), scale=6.0)
        yield make_op_example("sinh of large ones", "sinh", (2, 8), scale=6.0)
        yield make_op_example("flexible, for iOS15", "sinh", (None, 3), opset=ct.target.iOS15)
        yield make_op_example("fp32", "cosh", (2, 8), dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield make_op_example("not good enough", "sinh", (2, 8), options={"max_error": 3.0},
                              reason="off by up to 3.27 units in the last place, max_error=3")
        yield make_op_example("tanh", "tanh", (2, 8), reason="")
