"""Compute the mean of squares of an RMSNorm from reduce_l2_norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.bounds import bound_magnitude, get_measured_range
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.targets import Gate, format_generations
from ._norm_patterns import (
    FP16_MAX,
    Norm,
    build_factor,
    build_llama_norm,
    find_lowest_divisor,
    find_measured_total,
    is_epsilon_representable,
    iterate_norm_products,
    make_norm_example,
)

_MAX_ROOT = 16384.0
"Largest length by which x is divided where no mean raises the factor: the reciprocal of more is not normal in fp16."
_MIN_MEAN = 16
"Numbers in a mean from which its factor makes up for that."


class RmsNormL2(Rewrite):
    """Compute an RMSNorm from reduce_l2_norm of each row instead of squares, their mean and a root.

    why     In one runtime on an M5 a norm with reduce_l2_norm over the last axis was 41 to 53 times faster than one
            with reduce_sum over channels. The squares are not stored in fp16, so none of them overflows.
    when    x * rsqrt(mean(x^2) + eps) in fp16 over the last axis, in the forms that `ane::scaled_rms_norm` matches, if
            the length of a row is bounded (by the program, or by runs on user-supplied feeds or ranges). If its square
            fits fp16, the length is squared and the other ops stay. If only the length fits, x is divided by it first,
            and epsilons are scaled accordingly. If it is unbounded, or may exceed 65504, `ane::scaled_rms_norm` divides
            by the largest magnitude instead. Only for a target on which it was measured: M5.
    exact   rounding: mean(x^2) is l^2 / n, with l the length and n the number of elements; and for any m > 0 it is m^2
            times (l / m)^2 / n. m is l, at least the root of eps (as a power of two) and 2^-14, and at most 65504. An
            epsilon stays inside the root: a floor under the length instead, as others write it, would move results by
            up to 41 % where the length is near to it.
    cost    two passes over x (the length and the product) instead of three; with the division five more ops on one
            number per row.

    before
        %0: fp16[2, 3, 8] = pow(x=%x, y=2.0)
        %1: fp16[2, 3, 1] = reduce_mean(x=%0, axes=[-1], keep_dims=True)
        %2: fp16[2, 3, 1] = add(x=%1, y=9.5367431640625e-07)
        %3: fp16[2, 3, 1] = rsqrt(x=%2, epsilon=5.960464477539063e-08)
        %y: fp16[2, 3, 8] = mul(x=%x, y=%3)
    after
        %0: fp16[2, 3, 1] = reduce_l2_norm(x=%x, axes=[-1], keep_dims=True)
        %1: fp16[2, 3, 1] = square(x=%0)
        %2: fp16[2, 3, 1] = real_div(x=%1, y=8.0)
        %3: fp16[2, 3, 1] = add(x=%2, y=1.0132789611816406e-06)
        %4: fp16[2, 3, 1] = rsqrt(x=%3)
        %y: fp16[2, 3, 8] = mul(x=%x, y=%4)
    """

    code, slug = "ANE544", "rms-norm-by-squares"
    stage = "numerics"
    after = ("fp16_compute",)
    exactness = Exactness.ROUNDING
    bound = "one more rounding of the length and one of its square: two units in the last place"
    preset = "full"
    fixes_nonfinite = True
    moves = 2.0**-20
    moves_of = "result"
    measures = True
    roots = ("mul", "real_div")
    targets = Gate(first="m5", last="m5")
    severity, confidence = Severity.SUGGESTION, "medium"
    evidence = (
        Community(
            "RMSNorm of 1024 x 1024 by reduce_l2_norm: 6882 to 168 us, and of 2048 x 1024 13665 to 257 us, against a "
            "reduce_sum over channels (not through Core ML)", chip="M5",
            source="https://github.com/sbryngelson/ANEForge/pull/8", date="2026-06-17",
        ),
        Community(
            "Llama's norms as x * sqrt(d) / vector_norm(x), with a floor of sqrt(d * eps) under the length, stay "
            "finite in fp16",
            source="https://github.com/pytorch/executorch/pull/19523", date="2026-05",
        ),
        Community(
            "of little effect where the norm is not lowered to channels: a fused rms_norm made a block 5 % faster",
            chip="M2 Pro", source="trisanths/ane-llm-prefill", date="2026",
        ),
        Community(
            "contradicts it: activations with norms of hundreds of thousands exist, which exceed fp16",
            source="https://github.com/huggingface/swift-transformers/issues/95", date="2024-05",
        ),
    )

    margin: float = 2.0
    "Safety factor: the measured length times this factor must not overflow; other inputs may be larger."
    everywhere: bool = False
    "Rewrite for targets without measurements, too."

    def match(self, op: Operation) -> Hit | Miss:
        for value, factor, norm in iterate_norm_products(op):
            if norm.reduce.op_type != "reduce_l2_norm":
                return self._match_norm(op, value, factor, norm)
        return Miss(op, "no product with the root of a sum of squares", near=False)

    def _match_norm(self, op: Operation, value: Var, factor: Var, norm: Norm) -> Hit | Miss:
        if norm.x.dtype != types.fp16:
            return Miss(op, "squared in fp32, off the ANE", near=False)
        if norm.obstacle is not None:
            return Miss(op, norm.obstacle, near=False)
        elsewhere = [each for each in self.generations if not self.targets.includes(each)]
        if elsewhere and not self.everywhere:
            return Miss(op, f"measured on M5 only, not on {format_generations(elsewhere)}: choose that target, or "
                            f"everywhere=true", near=False)
        axes = [axis % norm.x.rank for axis in get_const_value(norm.reduce.axes) or range(norm.x.rank)]
        if axes != [norm.x.rank - 1]:
            return Miss(op, "reduced over axes other than the last; only that was measured")
        count = norm.count or 0
        if float(np.float16(count)) != count:
            return Miss(op, f"fp16 does not represent {count}, the number of elements")
        length = self._find_length(norm)
        if length is None:
            return Miss(op, "the length of rows is unbounded: give feeds or ranges, or use ane::scaled_rms_norm")
        averages = norm.reduce.op_type == "reduce_mean" and count >= _MIN_MEAN
        limit = FP16_MAX if averages else _MAX_ROOT
        if length > limit:
            return Miss(op, f"rows may have length {length:.4g}, above {limit:.0f}: use ane::scaled_rms_norm")
        squared = length**2 <= FP16_MAX and is_epsilon_representable(norm)
        how = "their squares fit fp16" if squared else "divided by it before it is squared"
        return Hit(op, value=value, factor=factor, norm=norm, squared=squared,
                   note=f"rows of {count} elements have a length of at most {length:.4g}; {how}")

    def _find_length(self, norm: Norm) -> float | None:
        """Return a bound on the length of a row, with the margin where it was measured."""
        bound = bound_magnitude(norm.x)
        if bound is not None:
            return bound * math.sqrt(norm.count or 0)
        measured = get_measured_range(self.measured, norm.x)
        if measured is None or not measured.finite:
            return None
        return self.margin * math.sqrt(find_measured_total(self.measured, norm, measured.largest))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        norm = hit.norm
        factor = mb.once(("by length", hit.factor, hit.squared), lambda: _build_factor(mb, norm, hit.squared))
        if not hit.squared:
            unscale = mb.mul if hit.op.op_type == "real_div" else mb.real_div
            divisor = _build_divisor(mb, norm)
            factor = mb.once(("unscaled", factor, divisor), lambda: unscale(x=factor, y=divisor))
        result: Var = getattr(mb, hit.op.op_type)(x=hit.value, y=factor)
        return result

    def examples(self) -> Iterable[Example]:
        def make_case(name: str, *args: Any, **settings: Any) -> Example:
            options = {"everywhere": True, **settings.pop("options", {})}
            return make_norm_example(name, *args, **{"options": options, **settings})

        yield make_case("as Llama's")
        yield make_case("long rows", width=64, scale=500.0)
        yield make_case("long rows of another norm", _build_sum_norm, scale=500.0)
        yield make_case("kept small", lambda x, number: build_llama_norm(Builder.tanh(x=x), number), measured=False)
        yield make_case("divided by the root", _build_root_norm, scale=4.0)
        yield make_case("divided by the root of a large sum", _build_root_norm, width=32, scale=300.0)
        yield make_case("not measured", measured=False,
                        reason="the length of rows is unbounded: give feeds or ranges, or use ane::scaled_rms_norm")
        yield make_case("too long", scale=20000.0,
                        reason="rows may have length 1.411e+05, above 16384: use ane::scaled_rms_norm")
        yield make_norm_example(
            "another target",
            reason="measured on M5 only, not on A12, A13, M1, M2, M3, M4, A18 and M6: choose that target, or "
                   "everywhere=true")
        yield make_case("over the first axis", _build_first_axis_norm,
                        reason="reduced over axes other than the last; only that was measured")
        yield make_case("in fp32", dtype=np.float32, reason="squared in fp32, off the ANE")
        yield make_case("an odd number of elements", width=2049, reason="fp16 does not represent 2049, the number of "
                                                                   "elements")
        yield make_case("a length already", lambda x, number: Builder.real_div(
            x=x, y=Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True), name="y"),
            reason="no product with the root of a sum of squares")


def _build_divisor(mb: RewriteBuilder, norm: Norm) -> Var:
    """Build the length of each row, finite and not below the scale of the epsilons."""
    lowest = find_lowest_divisor(norm)
    divisor: Var = mb.once(("divisor", norm.x, lowest), lambda: mb.clip(
        x=_build_length(mb, norm), alpha=np.float16(lowest), beta=np.float16(FP16_MAX)))
    return divisor


def _build_length(mb: RewriteBuilder, norm: Norm) -> Var:
    length: Var = mb.once(
        ("length", norm.x), lambda: mb.reduce_l2_norm(x=norm.x, axes=norm.reduce.axes, keep_dims=True))
    return length


def _build_factor(mb: RewriteBuilder, norm: Norm, squared: bool) -> Any:
    """Build the factor from the square of the length, or of the length divided by the divisor."""
    divisor = None if squared else _build_divisor(mb, norm)
    length = _build_length(mb, norm)
    value = mb.square(x=length if divisor is None else mb.real_div(x=length, y=divisor))
    if norm.reduce.op_type == "reduce_mean":
        value = mb.real_div(x=value, y=np.float16(norm.count or 1))
    return build_factor(mb, norm, value, divisor)


def _build_sum_norm(x: Var, number: Callable[[float], Any]) -> Any:
    total = Builder.reduce_sum_square(x=x, axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=total, epsilon=number(1e-5)), name="y")


def _build_root_norm(x: Var, number: Callable[[float], Any]) -> Any:
    mean = Builder.reduce_mean(x=Builder.mul(x=x, y=x), axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.add(x=mean, y=number(1e-5)))
    return Builder.real_div(x=x, y=Builder.add(x=root, y=number(1e-3)), name="y")


def _build_first_axis_norm(x: Var, number: Callable[[float], Any]) -> Any:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[0], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=number(1e-5)), name="y")
