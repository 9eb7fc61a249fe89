"""Compute mish without softplus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import Community, Exactness, Example, Hit, Measured, Miss, Rewrite, Severity
from ...passes.examples import make_example
from ..normalization._log_exp_patterns import find_softplus_miss, find_softplus_operand, is_made_by


class StableMish(Rewrite):
    """Compute mish, x * tanh(softplus(x)), from exponentials that are at most 1.

    why     On the ANE softplus is 0 from x = 10.4 on, and mish with it: a mean absolute error of 2.96 over the outputs
            of a network, 0.001 on the GPU.
    when    x * tanh(softplus(x)) in fp16, in either order, with softplus as an op, as log(1 + exp(x)) in any form that
            `ane::stable_softplus` matches, or with a select for a threshold of at least 8. Skipped: fp32, and x that
            never exceeds 10 (a clip, relu6, ...), where softplus is correct.
    exact   rounding: with a = exp(min(x, 0)) and b = exp(-relu(x)), one of which is 1, and n = a (a + 2b),
            tanh(softplus(x)) = n / (n + 2 b b). Nothing in it exceeds 5. A threshold is removed, because tanh is
            saturated there.
    cost    twelve ops instead of three. The source measured x / (1 + 2 / (e (e + 2))), e = exp(x), as correct (mean
            absolute error 0.0017), but that form needs exp to overflow to infinity. This form has the same ops without
            overflow; its accuracy on an ANE is predicted.

    before
        %0: fp16[1, 4, 8] = softplus(x=%x)
        %1: fp16[1, 4, 8] = tanh(x=%0)
        %y: fp16[1, 4, 8] = mul(x=%x, y=%1)
    after
        %0: fp16[1, 4, 8] = minimum(x=%x, y=0.0)
        %1: fp16[1, 4, 8] = exp(x=%0)
        %2: fp16[1, 4, 8] = relu(x=%x)
        %3: fp16[1, 4, 8] = mul(x=%2, y=-1.0)
        %4: fp16[1, 4, 8] = exp(x=%3)
        %5: fp16[1, 4, 8] = mul(x=%4, y=2.0)
        %6: fp16[1, 4, 8] = add(x=%1, y=%5)
        %7: fp16[1, 4, 8] = mul(x=%1, y=%6)
        %8: fp16[1, 4, 8] = mul(x=%4, y=%5)
        %9: fp16[1, 4, 8] = add(x=%7, y=%8)
        %10: fp16[1, 4, 8] = real_div(x=%7, y=%9)
        %y: fp16[1, 4, 8] = mul(x=%x, y=%10)
    """

    code, slug = "ANE306", "mish-cliff"
    severity = Severity.WRONG
    stage = "numerics"
    exactness = Exactness.ROUNDING
    bound = "six roundings of numbers between 0 and 5 besides the last product, which is rounded as before"
    preset = "safe"
    fixes_nonfinite = True
    roots = ("mul",)
    evidence = (
        Community("mish with softplus: mean absolute error 2.955 on the ANE, 0.001 on the GPU; with "
                  "x / (1 + 2 / (e (e + 2))), e = exp(x): 0.0017 and 0.0015",
                  source="https://github.com/apple/coremltools/pull/2618", date="2025-11-07"),
        Community("high errors of mish in fp16 on the ANE",
                  source="https://github.com/apple/coremltools/issues/2359", date="2024-10-05"),
        Measured("tanh and mul are correct for the output of softplus: the fault is in softplus",
                 source="https://github.com/apple/coremltools/issues/2687", chip="M3 Max", os="macOS 26.3.1"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        softplus = next((var.op.x for var in (op.y, op.x) if is_made_by(var, "tanh")), None)
        x = None if softplus is None else find_softplus_operand(softplus)
        if x is None:
            return Miss(op, "no product with tanh(softplus(x))", near=False)
        if x is not op.x and x is not op.y:
            return Miss(op, "tanh(softplus(x)) is multiplied by a value other than x")
        return find_softplus_miss(op, x) or Hit(
            op, x=x, note="mish fails in fp16 for large x: exponentials of -|x| instead of softplus")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x = hit.x
        a = mb.exp(x=mb.minimum(x=x, y=np.float16(0)))
        b = mb.exp(x=mb.mul(x=mb.relu(x=x), y=np.float16(-1)))
        double_b = mb.mul(x=b, y=np.float16(2))
        numerator = mb.mul(x=a, y=mb.add(x=a, y=double_b))
        denominator = mb.add(x=numerator, y=mb.mul(x=b, y=double_b))
        result: Var = mb.mul(x=x, y=mb.real_div(x=numerator, y=denominator))
        return result

    def examples(self) -> Iterable[Example]:
        yield _make_mish_example("as converted", _build_softplus)
        yield _make_mish_example("large", _build_softplus, scale=30.0)
        yield _make_mish_example("x last", _build_softplus, x_last=True)
        yield _make_mish_example(
            "by hand", lambda x: Builder.log(x=Builder.add(x=Builder.exp(x=x), y=np.float16(1))), scale=6.0)
        yield _make_mish_example("log1p, for iOS15", _build_log1p_exp, opset=ct.target.iOS15)
        yield _make_mish_example("with a threshold", lambda x: _build_threshold_softplus(x, 20.0), scale=6.0)
        yield _make_mish_example("low threshold", lambda x: _build_threshold_softplus(x, 1.0),
                                 reason="no product with tanh(softplus(x))")
        yield make_example(
            "another factor",
            lambda x: Builder.mul(x=Builder.relu(x=x), y=Builder.tanh(x=Builder.softplus(x=x)), name="y"),
            reason="tanh(softplus(x)) is multiplied by a value other than x",
            x=(1, 4, 8),
        )
        yield _make_mish_example("fp32", _build_softplus, dtype=types.fp32,
                                 reason="computed in fp32; the fault is in fp16 only")
        yield make_example(
            "bounded",
            lambda x: _build_mish(Builder.relu6(x=x), _build_softplus),
            reason="x never exceeds 6, and softplus is correct up to 10",
            x=(1, 4, 8),
        )
        yield make_example("no tanh", lambda x: Builder.mul(x=x, y=x, name="y"),
                           reason="no product with tanh(softplus(x))", x=(1, 4, 8))


def _make_mish_example(
    name: str, softplus: Callable[[Var], Any], x_last: bool = False, **settings: Any
) -> Example:
    return make_example(name, lambda x: _build_mish(x, softplus, x_last), x=(1, 4, 8), **settings)


def _build_mish(x: Var, softplus: Callable[[Var], Any], x_last: bool = False) -> Any:
    factor = Builder.tanh(x=softplus(x))
    return Builder.mul(x=factor, y=x, name="y") if x_last else Builder.mul(x=x, y=factor, name="y")


def _build_softplus(x: Var) -> Any:
    return Builder.softplus(x=x)


def _build_log1p_exp(x: Var) -> Any:
    return Builder.log(x=Builder.exp(x=x), epsilon=np.float16(1))


def _build_threshold_softplus(x: Var, threshold: float) -> Any:
    """Build softplus with x itself above `threshold`, as torch writes it."""
    return Builder.select(cond=Builder.greater(x=x, y=np.float16(threshold)), a=x, b=_build_log1p_exp(x))
