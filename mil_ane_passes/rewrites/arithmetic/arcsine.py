"""Compute asin and acos from atan."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...rules.unsupported_ops import ElementaryFunctions
from ._elementary_functions import EVIDENCE, build_single_op, reject_if_inaccurate

_MAX_ERROR_ULPS = {"asin": 1.79, "acos": 2.15}
"Largest error of the replacement in units in the last place, over all fp16 numbers."


class Arcsine(Rewrite):
    """Compute asin as twice, and acos as four times, the atan of something between -1 and 1.

    why     Core ML on an M4 rejects asin and acos, and so does the ANE's compiler on M1 to M5 when asked without Core
            ML. atan is taken.
    when    asin and acos of fp16 values.
    exact   rounding: asin x = 2 atan(x / (1 + sqrt((1 - x)(1 + x)))), by the tangent of half the angle, and
            acos x = 4 atan(sqrt((1 - x) / 2) / (1 + sqrt((1 + x) / 2))), by that of a quarter. Unlike in
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

    fixes = (ElementaryFunctions,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "1.79 units in the last place for asin and 2.15 for acos, over all fp16 numbers"
    preset = "full"
    roots = tuple(_MAX_ERROR_ULPS)
    evidence = EVIDENCE

    max_error: float = 4.0
    "Largest accepted error in units in the last place; asin is off by 1.79, acos by 2.15."

    def match(self, op: Operation) -> Hit | Miss:
        part = "half" if op.op_type == "asin" else "a quarter of"
        back = reject_if_inaccurate(op, _MAX_ERROR_ULPS[op.op_type], self.max_error)
        return back or Hit(op, note=f"by the tangent of {part} the angle", ulps=_MAX_ERROR_ULPS[op.op_type])

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x, one_, half = hit.op.x, np.float16(1), np.float16(0.5)
        below, above = mb.sub(x=one_, y=x), mb.add(x=x, y=one_)
        if hit.op.op_type == "asin":
            part, rest, times = x, mb.sqrt(x=mb.mul(x=below, y=above)), np.float16(2)
        else:
            part, rest = mb.sqrt(x=mb.mul(x=below, y=half)), mb.sqrt(x=mb.mul(x=above, y=half))
            times = np.float16(4)
        angle = mb.atan(x=mb.real_div(x=part, y=mb.add(x=rest, y=one_)))
        whole: Var = mb.mul(x=angle, y=times)
        return whole

    def examples(self) -> Iterable[Example]:
        yield Example("asin", lambda: build_single_op("asin"), scale=0.4)
        yield Example("acos", lambda: build_single_op("acos"), scale=0.4)
        yield Example("asin within its domain", lambda: build_single_op("asin"), within=1.0)
        yield Example("acos within its domain", lambda: build_single_op("acos"), within=1.0)
        yield Example(
            "flexible, for iOS15", lambda: build_single_op("acos", None, 3, opset=ct.target.iOS15), within=1.0
        )
        yield Example("fp32", lambda: build_single_op("asin", dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)
        yield Example("not good enough", lambda: build_single_op("acos"), options={"max_error": 2.0},
                      reason="off by up to 2.15 units in the last place, max_error=2")
        yield Example("atan", lambda: build_single_op("atan"), reason="")
