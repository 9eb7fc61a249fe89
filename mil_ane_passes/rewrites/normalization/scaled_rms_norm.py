"""Divide by the largest magnitude before squaring."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.bounds import bound_magnitude as largest_by_the_program
from ...ir.bounds import get_measured_range
from ...ir.builder import RewriteBuilder
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Vendor
from ._norms import (
    Norm,
    build_computed_sum_norm,
    build_divided_norm,
    build_dropped_axes_norm,
    build_l2_norm,
    build_largest_magnitude,
    build_norm_program,
    build_plain_l2_norm,
    build_prescaled_norm,
    build_reciprocal_norm,
    build_restored_axes_norm,
    build_shared_factor_norm,
    build_tanh_norm,
    match_norm,
    read_positive_scalar,
    rebuild_scaled_factor,
)

_FP16_MAX = 65504.0
"The largest finite number of fp16."


class ScaledRmsNorm(Rewrite):
    """Divide each row by its largest magnitude before it is squared, so that no square overflows fp16.

    why     The fp16 square of more than 256 is infinite; x times the reciprocal root of an infinite mean is 0, or NaN.
    when    x * rsqrt(mean(x^2) + eps) in fp16, in the spellings that exporters emit: squared by square, mul or pow;
            reduce_mean, reduce_sum (with or without a factor), reduce_sum_square; eps added before the root, after it,
            as a maximum, or an op's own; rsqrt, pow, or division by sqrt, also by way of inverse. What is multiplied
            need not be x, and each product with the root is a hit of its own; they share what they can. Not where
            more than 16384 numbers are summed, and not reduce_l2_norm, which sources recommend as the stable form.
    exact   rounding: for any m > 0, with y = x / m, it is y * rsqrt(mean(y^2) + eps / m^2). m is the largest
            magnitude, not below the root of eps (as a power of two), the smallest normal number of fp16, nor above
            65504; so rows of zeros stay zeros, and rows with infinities what they were. y stands above and below, so
            that an error of the division by m cancels; where another value is above, m goes to the root instead. Where
            rsqrt has an eps beside the one that is added, their sum rounds to fp16, which moves results by less than
            2^-20 of themselves.
    cost    seven ops more as Llama has it (4 to 10 in other spellings); three of them over all of x.

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
    stage = "numerics"
    after = ("fp16_compute",)
    exactness = Exactness.ROUNDING
    bound = "one rounding more of x, one of its largest magnitude's share in eps; about a unit in the last place, " \
            "and for what is below 2^-14 of its row's largest, where x / m is subnormal, 2^-25 of the largest result"
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
            "OpenELM ran wholly in fp16 after x was divided by its largest magnitude",
            source="https://github.com/huggingface/swift-transformers/issues/95", date="2024-05"),
    )

    margin: float = 2.0
    "Safety factor: the squares of the measured x times it must not overflow, as other inputs may reach further."
    always: bool = False
    "Rewrite whatever the known range of x, and also layer and group norms without one."

    def match(self, op: Operation) -> Hit | Miss:
        pairs = [(op.x, op.y)] if op.op_type == "real_div" else [(op.x, op.y), (op.y, op.x)]
        for given, factor in pairs:
            norm = (
                None
                if read_positive_scalar(given) is not None
                else match_norm(factor, 1 if op.op_type == "real_div" else -1)
            )
            if norm is None:
                continue
            if norm.x.dtype != types.fp16:
                return Miss(op, "squared in fp32, which overflows above 1.8e19 only")
            if norm.refusal is not None:
                return Miss(op, norm.refusal)
            reason = None if self.always else self._find_finite_reason(norm)
            if reason is not None:
                return Miss(op, reason)
            return Hit(op, note=f"{norm.count} numbers are squared; above 256 that overflows", given=given,
                       factor=factor, norm=norm)
        return Miss(op, "no product with the root of a sum of squares", near=False)

    def _find_finite_reason(self, norm: Norm) -> str | None:
        """Return why no overflow of the squares is expected, or None where one is possible."""
        reach, count = largest_by_the_program(norm.x), norm.count or 0
        if reach is not None and reach**2 * count <= _FP16_MAX:
            return f"the program keeps x within {reach:.4g}: {count} squares together stay below 65504"
        measured = get_measured_range(self.measured, norm.x)
        if measured is not None:
            total = self._find_measured_total(norm, measured.largest)
            if not measured.finite or total * self.margin**2 > _FP16_MAX:
                return None
            return (f"x reaches {measured.largest:.4g} in the runs at hand and a sum of squares {total:.4g}: "
                    f"{self.margin:g} times the x would still fit fp16")
        if reach is None and _is_centred(norm):
            return ("the variance of x less its mean, and nothing says how large x gets: give feeds or ranges "
                    "(calibrate shows it), or always=true")
        return None

    def _find_measured_total(self, norm: Norm, reach: float) -> float:
        """Return the largest measured sum of squares; a mean is computed from a sum, too."""
        count = norm.count or 0
        total = get_measured_range(self.measured, norm.reduce.outputs[0])
        if total is None or not total.finite:
            return reach**2 * count
        return max(reach**2, total.largest * (count if norm.reduce.op_type == "reduce_mean" else 1))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        norm = hit.norm
        most = build_largest_magnitude(mb, norm)

        def scaled(var: Var) -> Var:
            made: Var = mb.once(("scaled", var, most), lambda: mb.real_div(x=var, y=most))
            return made

        factor = mb.once(("factor", hit.factor, most), lambda: rebuild_scaled_factor(mb, norm, scaled(norm.x), most))
        if hit.given is norm.x:
            given = scaled(hit.given)
        else:  # divided by a small m, it may overflow where the result does not
            given, by = hit.given, mb.mul if hit.op.op_type == "real_div" else mb.real_div
            factor = mb.once(("whole", factor, most), lambda: by(x=factor, y=most))
        result: Var = getattr(mb, hit.op.op_type)(x=given, y=factor)
        return result

    def examples(self) -> Iterable[Example]:
        yield Example("as Llama's", build_norm_program, measured=False)
        yield Example("large", build_norm_program, scale=500.0)
        yield Example("spelt with divisions", lambda: build_norm_program(build_divided_norm), scale=500.0)
        yield Example("an older opset", lambda: build_norm_program(opset=ct.target.iOS15), scale=500.0)
        yield Example("without epsilon", lambda: build_norm_program(build_plain_l2_norm), scale=500.0)
        yield Example(
            "a reciprocal with an epsilon of its own",
            lambda: build_norm_program(build_reciprocal_norm),
            scale=500.0,
        )
        yield Example("less its mean, read twice", build_shared_factor_norm, scale=500.0)
        yield Example("less its mean, always", build_shared_factor_norm, measured=False, options={"always": True})
        yield Example("less its mean, not measured", build_shared_factor_norm, measured=False,
                      reason="the variance of x less its mean, and nothing says how large x gets: give feeds or ranges "
                             "(calibrate shows it), or always=true")
        yield Example(
            "measured to be small",
            build_norm_program,
            reason="x reaches 2.324 in the runs at hand and a sum of squares 12.43: 2 times the x would still fit fp16",
        )
        yield Example("kept small", lambda: build_norm_program(build_tanh_norm), measured=False,
                      reason="the program keeps x within 1: 8 squares together stay below 65504")
        yield Example("in fp32", lambda: build_norm_program(dtype=np.float32),
                      reason="squared in fp32, which overflows above 1.8e19 only")
        yield Example("scaled already", lambda: build_norm_program(build_prescaled_norm),
                      reason="x is divided by its largest magnitude already")
        yield Example("another norm", lambda: build_norm_program(build_l2_norm),
                      reason="reduce_l2_norm squares inside, which is reported to stay stable")
        yield Example(
            "axes dropped and put back", lambda: build_norm_program(build_restored_axes_norm), scale=500.0
        )
        yield Example(
            "axes dropped",
            lambda: build_norm_program(build_dropped_axes_norm),
            reason="the root is brought to another shape than that of a sum that keeps its axes",
        )
        yield Example("epsilon computed", lambda: build_norm_program(build_computed_sum_norm),
                      reason="add gives 'total', but not with a constant number above 0")
        yield Example("long", lambda: build_norm_program(width=16385),
                      reason="the sum is over 16385 numbers, above 16384: of numbers up to 1 its parts are too small "
                             "for fp16")
        yield Example(
            "no norm",
            lambda: build_norm_program(lambda x, half: Builder.mul(x=x, y=Builder.rsqrt(x=x), name="y")),
            reason="no product with the root of a sum of squares",
        )


def _is_centred(norm: Norm) -> bool:
    """Return whether the squared value is a value minus its own mean."""
    less = norm.x.op
    if less is None or less.op_type != "sub":
        return False
    mean = less.y.op
    while mean is not None and mean.op_type in ("expand_dims", "reshape", "squeeze"):
        mean = mean.x.op
    return mean is not None and mean.op_type == "reduce_mean" and mean.x is less.x
