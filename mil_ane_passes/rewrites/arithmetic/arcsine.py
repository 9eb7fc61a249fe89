"""Compute asin and acos from atan."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example, Hit
from ...passes.examples import make_op_example
from ._elementary_functions import ElementaryRewrite


class Arcsine(ElementaryRewrite):
    """Compute asin and acos as multiples of an atan in [-1, 1].

    why     Core ML on an M4 rejects asin and acos, and so does the ANE's compiler on M1 to M5 when queried without Core
            ML. atan is supported.
    when    asin and acos of fp16 values.
    exact   rounding: asin x = 2 atan(x / (1 + sqrt((1 - x)(1 + x)))), by the half-angle formula, and
            acos x = 4 atan(sqrt((1 - x) / 2) / (1 + sqrt((1 + x) / 2))), by the quarter-angle formula. Unlike in
            atan(x / sqrt(1 - x x)) nothing cancels and nothing is infinite at -1 and 1. Over all fp16 numbers asin is
            within 1.79 units in the last place (relative 1.2e-3 of what is not subnormal), acos within 2.15 (1.4e-3).
            Beyond -1 and 1 a square root of a negative number gives NaN, as before.
    cost    eight ops for asin, ten for acos.

    before
        %y: fp16[2, 8] = asin(x=%x)
    after
        %0: fp16[2, 8] = sub(x=1.0, y=%x)
        %1: fp16[2, 8] = add(x=%x, y=1.0)
        %2: fp16[2, 8] = mul(x=%0, y=%1)
        %3: fp16[2, 8] = sqrt(x=%2)
        %4: fp16[2, 8] = add(x=%3, y=1.0)
        %5: fp16[2, 8] = real_div(x=%x, y=%4)
        %6: fp16[2, 8] = atan(x=%5)
        %y: fp16[2, 8] = mul(x=%6, y=2.0)
    """

    bound = "1.79 units in the last place for asin and 2.15 for acos, over all fp16 numbers"
    roots = ("asin", "acos")
    forms = {
        "asin": ("half-angle formula", 1.79),
        "acos": ("quarter-angle formula", 2.15),
    }

    max_error: float = 4.0
    "Maximum accepted error in units in the last place; asin is off by 1.79, acos by 2.15."

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x, one, half = hit.op.x, np.float16(1), np.float16(0.5)
        below, above = mb.sub(x=one, y=x), mb.add(x=x, y=one)  # the distances to the ends of the domain
        if hit.op.op_type == "asin":
            sine, cosine, factor = x, mb.sqrt(x=mb.mul(x=below, y=above)), np.float16(2)
        else:  # of half the angle
            sine, cosine = mb.sqrt(x=mb.mul(x=below, y=half)), mb.sqrt(x=mb.mul(x=above, y=half))
            factor = np.float16(4)
        angle = mb.atan(x=mb.real_div(x=sine, y=mb.add(x=cosine, y=one)))
        result: Var = mb.mul(x=angle, y=factor)
        return result

    def examples(self) -> Iterable[Example]:
        yield make_op_example("asin", "asin", (2, 8), scale=0.4)
        yield make_op_example("acos", "acos", (2, 8), scale=0.4)
        yield make_op_example("asin within its domain", "asin", (2, 8), within=1.0)
        yield make_op_example("acos within its domain", "acos", (2, 8), within=1.0)
        yield make_op_example("flexible, for iOS15", "acos", (None, 3), opset=ct.target.iOS15, within=1.0)
        yield make_op_example("fp32", "asin", (2, 8), dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield make_op_example("not good enough", "acos", (2, 8), options={"max_error": 2.0},
                              reason="off by up to 2.15 units in the last place, max_error=2")
        yield make_op_example("atan", "atan", (2, 8), reason="")
