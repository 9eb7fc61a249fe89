"""Compute softplus where its exponential cannot overflow fp16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import Community, Exactness, Example, Hit, Measured, Miss, Rewrite, Severity
from ...passes.examples import make_example, make_op_example
from ..normalization._log_exp_patterns import find_log1p_exp_operand, find_softplus_miss

_SHAPE = (1, 4, 8)
"Shape of the input of the examples."


class StableSoftplus(Rewrite):
    """Compute softplus as relu(x) + softplus(-|x|), which is correct on the ANE for large x.

    why     On the ANE softplus in fp16 is 0 from x = 10.4 on (11 in another report), and log(1 + exp(x)) is infinite
            above 11.09, where exp(x) overflows fp16.
    when    softplus, and log(1 + exp(x)) with the 1 on either side or as log's epsilon (as `log1p` is converted), in
            fp16. The factors of a softplus with beta and the select of one with a threshold stay as they are. Skipped:
            fp32, x that never exceeds 10 (a clip, relu6, sigmoid, ...), softplus_parametric (not reported).
    exact   rounding: an identity for all x. The op is kept for -|x|, which is never positive: there it is correct on
            all reported chips. The sources replace it by log(1 + exp(-|x|)); the accuracy of the op is predicted.
            Infinite results become finite.
    cost    five elementwise ops instead of one.

    before
        %y: fp16[1, 4, 8] = softplus(x=%x)
    after
        %0: fp16[1, 4, 8] = abs(x=%x)
        %1: fp16[1, 4, 8] = mul(x=%0, y=-1.0)
        %2: fp16[1, 4, 8] = relu(x=%x)
        %3: fp16[1, 4, 8] = softplus(x=%1)
        %y: fp16[1, 4, 8] = add(x=%2, y=%3)
    """

    code, slug = "ANE305", "softplus-cliff"
    severity = Severity.WRONG
    stage, after = "numerics", ("stable_mish",)
    exactness = Exactness.ROUNDING
    bound = "half a unit in the last place of softplus(-|x|), which is at most 0.7, plus half of the result"
    preset = "safe"
    fixes_nonfinite = True
    roots = ("softplus", "log")
    evidence = (
        Measured("softplus in fp16 on the ANE drops to 0 at 10.4; max(x, 0) + log(1 + exp(-|x|)) does not",
                 source="https://github.com/apple/coremltools/issues/2687", chip="M3 Max", os="macOS 26.3.1"),
        Measured("softplus(10) is correct, softplus(11) and everything above is 0",
                 source="https://github.com/sbryngelson/ANEForge/issues/113", chip="M5", os="macOS 26.5",
                 date="2026-07-23"),
        Community("softplus and mish overflow in fp16 on the ANE; the form with max(x, 0) does not",
                  source="https://github.com/apple/coremltools/pull/2725", date="2026-05-28"),
        Community("on an M2 Pro no shape was found for which softplus runs on the ANE, so there is no failure",
                  source="https://github.com/apple/coremltools/pull/2814", chip="M2 Pro", date="2026-08-10"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        x = op.x if op.op_type == "softplus" else find_log1p_exp_operand(op)
        if x is None:
            return Miss(op, "not the logarithm of 1 + exp(x)", near=False)
        form = "softplus" if op.op_type == "softplus" else "log(1 + exp(x))"
        return find_softplus_miss(op, x) or Hit(
            op, x=x, note=f"{form} fails in fp16 for large x: relu(x) + softplus(-|x|)")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x = hit.x
        magnitude = mb.mul(x=mb.abs(x=x), y=np.float16(-1))
        result: Var = mb.add(x=mb.relu(x=x), y=mb.softplus(x=magnitude))
        return result

    def examples(self) -> Iterable[Example]:
        no_softplus = "not the logarithm of 1 + exp(x)"
        yield make_op_example("op", "softplus", _SHAPE)
        yield make_op_example("large", "softplus", _SHAPE, scale=30.0)
        yield make_example("with beta", lambda x: Builder.mul(
            x=Builder.softplus(x=Builder.mul(x=np.float16(2), y=x)), y=np.float16(0.5), name="y"), x=_SHAPE)
        yield make_example("with a threshold", lambda x: Builder.select(
            cond=Builder.greater(x=x, y=np.float16(5)), a=x, b=Builder.softplus(x=x), name="y"), x=_SHAPE)
        yield make_example("by hand", lambda x: _build_log_sum(Builder.exp(x=x), np.float16(1)), x=_SHAPE)
        yield make_example("1 first, for iOS15", lambda x: _build_log_sum(np.float16(1), Builder.exp(x=x)), x=_SHAPE,
                           opset=ct.target.iOS15)
        yield make_example("log1p", lambda x: Builder.log(x=Builder.exp(x=x), epsilon=np.float16(1), name="y"),
                           scale=30.0, x=_SHAPE)
        yield make_op_example("fp32", "softplus", _SHAPE, dtype=types.fp32,
                              reason="computed in fp32; the fault is in fp16 only")
        yield make_example("bounded", lambda x: Builder.softplus(x=Builder.relu6(x=x), name="y"), x=_SHAPE,
                           reason="x never exceeds 6, and softplus is correct up to 10")
        yield make_example("other logarithm", lambda x: Builder.log(x=Builder.exp(x=x), name="y"), x=_SHAPE,
                           reason=no_softplus)
        yield make_example("2 + exp", lambda x: _build_log_sum(Builder.exp(x=x), np.float16(2)), x=_SHAPE,
                           reason=no_softplus)
        yield make_example("1 that widens", lambda x: _build_log_sum(Builder.exp(x=x), np.ones((3, 4, 8), np.float16)),
                           x=_SHAPE, reason=no_softplus)


def _build_log_sum(x: Any, y: Any) -> Any:
    return Builder.log(x=Builder.add(x=x, y=y), name="y")
