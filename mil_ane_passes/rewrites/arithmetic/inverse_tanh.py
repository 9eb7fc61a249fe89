"""Compute atanh from log."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example, Hit
from ...passes.examples import make_op_example
from ._elementary_functions import ElementaryRewrite


class InverseTanh(ElementaryRewrite):
    """Compute atanh from the logarithm of (1 - |x|) / (1 + |x|), accurately for small x.

    why     Core ML on an M4 rejects atanh, and so does the ANE's compiler on M1 to M5 when queried without Core ML.
            log is supported.
    when    atanh of fp16 values.
    exact   rounding: with a = |x| and w = (1 - a) / (1 + a), atanh x = x / (1 + a) * log(w) / (w - 1). The logarithm is
            divided by the rounded w minus 1, which cancels most of the rounding error; for w = 1 the quotient is 1.
            log((1 + x) / (1 - x)) / 2 would be 0 for every x below 0.0005. Over all fp16 numbers within 2.97 units in
            the last place (relative 1.8e-3 of what is not subnormal). -1 and 1 give infinities, values outside NaN, as
            before.
    cost    twelve ops.

    before
        %y: fp16[2, 8] = atanh(x=%x)
    after
        %0: fp16[2, 8] = abs(x=%x)
        %1: fp16[2, 8] = add(x=%0, y=1.0)
        %2: fp16[2, 8] = sub(x=1.0, y=%0)
        %3: fp16[2, 8] = real_div(x=%2, y=%1)
        %4: bool[2, 8] = equal(x=%3, y=1.0)
        %5: fp16[2, 8] = log(x=%3)
        %6: fp16[2, 8] = select(cond=%4, a=-1.0, b=%5)
        %7: fp16[2, 8] = sub(x=%3, y=1.0)
        %8: fp16[2, 8] = select(cond=%4, a=-1.0, b=%7)
        %9: fp16[2, 8] = real_div(x=%6, y=%8)
        %10: fp16[2, 8] = real_div(x=%9, y=%1)
        %y: fp16[2, 8] = mul(x=%x, y=%10)
    """

    bound = "2.97 units in the last place over all fp16 numbers"
    roots = ("atanh",)
    forms = {"atanh": ("x / (1 + |x|) * log(w) / (w - 1), w = (1 - |x|) / (1 + |x|)", 2.97)}

    max_error: float = 4.0
    "Maximum accepted error in units in the last place; it is off by 2.97."

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x, one, minus_one = hit.op.x, np.float16(1), np.float16(-1)
        magnitude = mb.abs(x=x)
        above = mb.add(x=magnitude, y=one)
        w = mb.real_div(x=mb.sub(x=one, y=magnitude), y=above)
        is_one = mb.equal(x=w, y=one)  # where log(w) / (w - 1) would be 0 / 0, it is -1 / -1
        log = mb.select(cond=is_one, a=minus_one, b=mb.log(x=w, epsilon=np.float16(0)))
        distance = mb.select(cond=is_one, a=minus_one, b=mb.sub(x=w, y=one))
        result: Var = mb.mul(x=x, y=mb.real_div(x=mb.real_div(x=log, y=distance), y=above))
        return result

    def examples(self) -> Iterable[Example]:
        yield make_op_example("op", "atanh", (2, 8), scale=0.4)
        yield make_op_example("within its domain", "atanh", (2, 8), within=1.0)
        yield make_op_example("small ones", "atanh", (2, 8), scale=0.001)
        yield make_op_example("flexible, for iOS15", "atanh", (None, 3), opset=ct.target.iOS15, within=0.9)
        yield make_op_example("fp32", "atanh", (2, 8), dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield make_op_example("not good enough", "atanh", (2, 8), options={"max_error": 2.5},
                              reason="off by up to 2.97 units in the last place, max_error=2.5")
        yield make_op_example("tanh", "tanh", (2, 8), reason="")
