"""Divide by the largest magnitude before squaring."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.bounds import bound_magnitude, get_measured_range
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity, Vendor
from ...passes.examples import make_example
from ._norm_patterns import (
    FP16_MAX,
    Norm,
    build_factor,
    build_llama_norm,
    find_lowest_divisor,
    find_measured_total,
    iterate_norm_products,
    make_norm_example,
)


class ScaledRmsNorm(Rewrite):
    """Divide each row by its largest magnitude before squaring, so that no square overflows fp16.

    why     Squares of numbers from 256 on are infinite in fp16; x times the reciprocal root of an infinite mean is 0,
            or NaN.
    when    x * rsqrt(mean(x^2) + eps) in fp16, in the forms that exporters emit: squared by square, mul or pow;
            reduce_mean, reduce_sum (with or without a factor), reduce_sum_square; eps added before the root, after it,
            as a maximum, or an op's own; rsqrt, pow, or division by sqrt, also by way of inverse. The other factor need
            not be x; each product with the root is a separate match, and they share ops. Not for sums of more than
            16384 numbers, and not for reduce_l2_norm, which sources recommend as the stable form.
    exact   rounding: for any m > 0, with y = x / m, it is y * rsqrt(mean(y^2) + eps / m^2). m is the largest magnitude
            of the row, at least the root of eps (as a power of two) and the smallest normal number of fp16, and at most
            65504; so rows of zeros stay zeros, and rows with infinities are unchanged. y is in numerator and
            denominator, so that an error of the division by m cancels; with another numerator, m is applied to the root
            instead. If rsqrt has an eps in addition to the added one, their sum rounds to fp16, which moves results by
            less than 2^-20 of themselves.
    cost    seven more ops for the form in Llama (4 to 10 in other forms); three of them over all of x.

    before
        %0: fp16[2, 3, 8] = pow(x=%x, y=2.0)
        %1: fp16[2, 3, 1] = reduce_mean(x=%0, axes=[-1], keep_dims=True)
        %2: fp16[2, 3, 1] = add(x=%1, y=9.5367431640625e-07)
        %3: fp16[2, 3, 1] = rsqrt(x=%2, epsilon=5.960464477539063e-08)
        %y: fp16[2, 3, 8] = mul(x=%x, y=%3)
    after
        %0: fp16[2, 3, 8] = abs(x=%x)
        %1: fp16[2, 3, 1] = reduce_max(x=%0, axes=[-1], keep_dims=True)
        %2: fp16[2, 3, 1] = clip(x=%1, alpha=0.0009765625, beta=65504.0)
        %3: fp16[2, 3, 8] = real_div(x=%x, y=%2)
        %4: fp16[2, 3, 8] = square(x=%3)
        %5: fp16[2, 3, 1] = reduce_mean(x=%4, axes=[-1], keep_dims=True)
        %6: fp16[2, 3, 1] = real_div(x=0.0009765625, y=%2)
        %7: fp16[2, 3, 1] = square(x=%6)
        %8: fp16[2, 3, 1] = mul(x=%7, y=1.0625)
        %9: fp16[2, 3, 1] = add(x=%5, y=%8)
        %10: fp16[2, 3, 1] = rsqrt(x=%9)
        %y: fp16[2, 3, 8] = mul(x=%3, y=%10)
    """

    code, slug = "ANE309", "rms-norm-square-overflow"
    severity = Severity.WRONG
    stage = "numerics"
    after = ("fp16_compute", "rms_norm_l2")
    exactness = Exactness.ROUNDING
    bound = "one more rounding of x and one of eps / m^2: about a unit in the last place; for elements below 2^-14 " \
            "of the largest in their row, where x / m is subnormal, 2^-25 of the largest result"
    preset = "safe"
    fixes_nonfinite = True
    moves = 2.0**-20
    moves_of = "result"
    measures = True
    roots = ("mul", "real_div")
    evidence = (
        Vendor(
            "\"computing x^2 directly can cause FP16 overflow for large activation values (>256)\"; coremltools' own "
            "conversion of rms_norm divides by the largest magnitude first",
            source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"),
        Community(
            "that conversion adds eps undivided: eps times the square of the largest magnitude; 4 to 6 % in one model",
            source="https://github.com/apple/coremltools/issues/2821", date="2026-08"),
        Community(
            "256 * 256 is infinite on the ANE", chip="M4, M6",
            source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md"),
        Community(
            "a default RMSNorm overflows on the ANE; in fp32 it is not placed there",
            source="https://github.com/apple/coremltools/issues/2585", date="2025-09"),
        Community(
            "the casts to fp32 around the mean are stripped and the sum of squares overflows; fixed by one vector_norm",
            source="https://github.com/pytorch/executorch/pull/19523", date="2026-05"),
        Community(
            "OpenELM ran entirely in fp16 after x was divided by its largest magnitude",
            source="https://github.com/huggingface/swift-transformers/issues/95", date="2024-05"),
    )

    margin: float = 2.0
    "Safety factor: the squares of the measured x times this factor must not overflow; other inputs may be larger."
    always: bool = False
    "Rewrite for any known range of x, and also layer and group norms of unknown range."

    def match(self, op: Operation) -> Hit | Miss:
        for value, factor, norm in iterate_norm_products(op):
            if norm.x.dtype != types.fp16:
                return Miss(op, "squared in fp32, which overflows above 1.8e19 only")
            if norm.obstacle is not None:
                return Miss(op, norm.obstacle)
            reason = None if self.always else self._find_finite_reason(norm)
            if reason is not None:
                return Miss(op, reason)
            return Hit(op, note=f"{norm.count} numbers are squared, which overflows above 256", value=value,
                       factor=factor, norm=norm)
        return Miss(op, "no product with the root of a sum of squares", near=False)

    def _find_finite_reason(self, norm: Norm) -> str | None:
        """Return why no overflow of the squares is expected, or None where one is possible."""
        bound, count = bound_magnitude(norm.x), norm.count or 0
        if bound is not None and bound**2 * count <= FP16_MAX:
            return f"the program keeps x within {bound:.4g}: the sum of {count} squares stays below 65504"
        measured = get_measured_range(self.measured, norm.x)
        if measured is not None:
            total = find_measured_total(self.measured, norm, measured.largest)
            if not measured.finite or total * self.margin**2 > FP16_MAX:
                return None
            return (f"x reaches {measured.largest:.4g} in the measured runs and a sum of squares {total:.4g}: "
                    f"{self.margin:g} times this x would still fit fp16")
        if bound is None and _is_centred(norm):
            return ("the variance of x minus its mean, and the range of x is unknown: give feeds or ranges, or "
                    "always=true")
        return None

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        norm = hit.norm
        largest = _build_largest_magnitude(mb, norm)

        def scale_down(var: Var) -> Any:
            return mb.once(("scaled", var, largest), lambda: mb.real_div(x=var, y=largest))

        factor = mb.once(
            ("factor", hit.factor, largest), lambda: _build_scaled_factor(mb, norm, scale_down(norm.x), largest))
        if hit.value is norm.x:
            value = scale_down(hit.value)
        else:  # divided by a small number, it may overflow where the result does not
            value, unscale = hit.value, mb.mul if hit.op.op_type == "real_div" else mb.real_div
            factor = mb.once(("whole", factor, largest), lambda: unscale(x=factor, y=largest))
        result: Var = getattr(mb, hit.op.op_type)(x=value, y=factor)
        return result

    def examples(self) -> Iterable[Example]:
        yield make_norm_example("as Llama's", measured=False)
        yield make_norm_example("large", scale=500.0)
        yield make_norm_example("with divisions", _build_divided_norm, scale=500.0)
        yield make_norm_example("an older opset", opset=ct.target.iOS15, scale=500.0)
        yield make_norm_example("without epsilon", _build_l2_norm_by_root, scale=500.0)
        yield make_norm_example("a reciprocal with an epsilon of its own", _build_reciprocal_norm, scale=500.0)
        yield make_example("minus its mean, read twice", _build_centred_norm, scale=500.0, x=(2, 3, 8))
        yield make_example("minus its mean, always", _build_centred_norm, measured=False, options={"always": True},
                           x=(2, 3, 8))
        yield make_example("minus its mean, not measured", _build_centred_norm, measured=False, x=(2, 3, 8),
                           reason="the variance of x minus its mean, and the range of x is unknown: give feeds or "
                                  "ranges, or always=true")
        yield make_norm_example(
            "measured to be small",
            reason="x reaches 2.324 in the measured runs and a sum of squares 12.43: 2 times this x would still fit "
                   "fp16")
        yield make_norm_example(
            "kept small", lambda x, number: build_llama_norm(Builder.tanh(x=x), number), measured=False,
            reason="the program keeps x within 1: the sum of 8 squares stays below 65504")
        yield make_norm_example("in fp32", dtype=np.float32,
                                reason="squared in fp32, which overflows above 1.8e19 only")
        yield make_norm_example("scaled already", _build_prescaled_norm,
                                reason="x is divided by its largest magnitude already")
        yield make_norm_example("another norm", _build_reduce_l2_norm,
                                reason="reduce_l2_norm squares inside, which is reported to stay stable")
        yield make_norm_example("axes dropped and put back", _build_restored_axes_norm, scale=500.0)
        yield make_norm_example("axes dropped", _build_dropped_axes_norm,
                                reason="the root is reshaped to a shape other than that of a sum with kept axes")
        yield make_norm_example("epsilon computed", _build_computed_epsilon_norm,
                                reason="add gives 'total', but not with a constant number above 0")
        yield make_norm_example("long", width=16385,
                                reason="the sum is over 16385 numbers, above 16384: of numbers up to 1 its terms are "
                                       "too small for fp16")
        yield make_norm_example("no norm", lambda x, number: Builder.mul(x=x, y=Builder.rsqrt(x=x), name="y"),
                                reason="no product with the root of a sum of squares")


def _is_centred(norm: Norm) -> bool:
    """Return whether the squared value is a value minus its own mean."""
    difference = norm.x.op
    if difference is None or difference.op_type != "sub":
        return False
    mean = difference.y.op
    while mean is not None and mean.op_type in ("expand_dims", "reshape", "squeeze"):
        mean = mean.x.op
    return mean is not None and mean.op_type == "reduce_mean" and mean.x is difference.x


def _build_largest_magnitude(mb: RewriteBuilder, norm: Norm) -> Var:
    """Build the largest magnitude of each row of x, finite and not below the scale of the epsilons."""
    lowest = find_lowest_divisor(norm)
    axes, x = norm.reduce.axes, norm.x

    def build_maximum() -> Any:
        largest = mb.reduce_max(x=mb.abs(x=x), axes=axes, keep_dims=True)
        return mb.clip(x=largest, alpha=np.float16(lowest), beta=np.float16(FP16_MAX))

    result: Var = mb.once(("largest", x, None if axes is None else tuple(get_const_value(axes)), lowest), build_maximum)
    return result


def _build_scaled_factor(mb: RewriteBuilder, norm: Norm, scaled: Var, largest: Var) -> Any:
    """Build the factor for `scaled`, which is x divided by `largest`, by the same steps.

    Each epsilon is divided by the power of `largest` with which the sum of squares grows at that point.
    """
    axes = norm.reduce.axes
    value: Any
    if norm.reduce.op_type == "reduce_sum_square":
        value = mb.reduce_sum_square(x=scaled, axes=axes, keep_dims=True)
    else:
        reduce = mb.reduce_mean if norm.reduce.op_type == "reduce_mean" else mb.reduce_sum
        value = reduce(x=mb.square(x=scaled), axes=axes, keep_dims=True)
    return build_factor(mb, norm, value, largest)


def _build_centred_norm(x: Var) -> list[Var]:
    """Build a norm of x minus its mean, whose factor also multiplies x itself."""
    difference = Builder.sub(x=x, y=Builder.reduce_mean(x=x, axes=[-1], keep_dims=True))
    mean = Builder.reduce_mean(x=Builder.square(x=difference), axes=[-1], keep_dims=True)
    factor = Builder.rsqrt(x=mean, epsilon=np.float16(1e-4))
    return [Builder.mul(x=difference, y=factor, name="y"), Builder.mul(x=factor, y=x, name="z")]


def _build_divided_norm(x: Var, number: Any) -> Any:
    total = Builder.reduce_sum(x=Builder.mul(x=x, y=x), axes=[-1], keep_dims=True)
    mean = Builder.add(x=number(1e-5), y=Builder.real_div(x=total, y=number(8)))
    return Builder.real_div(x=x, y=Builder.add(x=Builder.sqrt(x=mean), y=number(1e-3)), name="y")


def _build_l2_norm_by_root(x: Var, number: Any) -> Any:
    total = Builder.reduce_sum(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.sqrt(x=total), name="y")


def _build_reciprocal_norm(x: Var, number: Any) -> Any:
    total = Builder.reduce_sum_square(x=x, axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.maximum(x=Builder.mul(x=total, y=number(0.125)), y=number(1e-4)))
    return Builder.mul(x=Builder.inverse(x=root, epsilon=number(1e-4)), y=x, name="y")


def _build_prescaled_norm(x: Var, number: Any) -> Any:
    largest = Builder.reduce_max(x=Builder.abs(x=x), axes=[-1], keep_dims=True)
    mean = Builder.reduce_mean(x=Builder.square(x=Builder.real_div(x=x, y=largest)), axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.add(x=mean, y=number(1e-5)))
    return Builder.real_div(x=x, y=Builder.mul(x=root, y=largest), name="y")


def _build_reduce_l2_norm(x: Var, number: Any) -> Any:
    return Builder.real_div(x=x, y=Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True), name="y")


def _build_restored_axes_norm(x: Var, number: Any) -> Any:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=False)
    root = Builder.rsqrt(x=Builder.add(x=mean, y=number(1e-5)), epsilon=number(2.0**-24))
    return Builder.mul(x=x, y=Builder.expand_dims(x=root, axes=[-1]), name="y")


def _build_dropped_axes_norm(x: Var, number: Any) -> Any:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[0, 1], keep_dims=False)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=number(1e-5)), name="y")


def _build_computed_epsilon_norm(x: Var, number: Any) -> Any:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    total = Builder.add(x=mean, y=Builder.reduce_max(x=x, axes=[-1], keep_dims=True), name="total")
    return Builder.mul(x=x, y=Builder.rsqrt(x=total, epsilon=number(1e-5)), name="y")
