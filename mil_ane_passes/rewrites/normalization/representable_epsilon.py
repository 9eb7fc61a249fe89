"""Raise the epsilons of norms that fp16 flushes to zero."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_const
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Vendor
from ._norms import (
    build_batch_norm,
    build_fraction,
    build_logarithm,
    build_norm_op,
    build_norm_program,
    build_observed_norm,
    build_reciprocal_root,
    build_rsqrt_epsilon_norm,
    build_torch_normalize,
    build_unrelated_product,
    match_norm,
    read_positive_scalar,
)

__all__ = ["find_epsilon", "find_epsilon_dependence"]


_FP16_MIN_SUBNORMAL = 2.0**-24
"The smallest positive number of fp16."
_FP16_MIN_NORMAL = 2.0**-14
"The smallest normal number of fp16."
_FP16_CAST_SOURCE = "https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/mil/passes/defs/quantization.py"
_NORM_OPS = ("layer_norm", "instance_norm", "l2_norm")
_DIVIDING_OPS = ("sqrt", "rsqrt", "pow", "inverse", "real_div", "tile")
_BINARY_STEPS, _UNARY_STEPS = ("add", "maximum", "mul", "real_div"), ("sqrt", "rsqrt", "pow", "inverse", "clip", "tile")
"Ops between a norm and the division by it: with a constant operand, and without."
_MAX_PRODUCT_DEPTH = 3
"Number of nested products that are searched for the squared value."
_MIN_EXPLICIT_EPSILON = 1e-40
"Smallest epsilon that counts as one: below it is coremltools' default of log, which means no epsilon."
_NEGLIGIBLE_EPSILON_RATIO = 2.0**10
"Ratio of a variance to an epsilon from which adding the epsilon moves it by half a unit of fp16 at most."


class RepresentableEpsilon(Rewrite):
    """Raise an epsilon that fp16 flushes to zero to the smallest number that it holds.

    why     Computed in fp16, an epsilon below 2^-25 is 0: a row without variance divides 0 by 0. coremltools' cast to
            fp16 raises those it casts to 2^-24; an epsilon kept in fp32 (from iOS17) or written by other tools is not.
    when    the epsilon of layer_norm, instance_norm and l2_norm in fp16, and of a rsqrt whose root of a sum of squares
            is only multiplied with what was squared. There the numerator is 0 where the epsilon decides. Not for log
            and other roots, whose result at 0 is the epsilon's. batch_norm: its variances are known, and either are so
            large that the epsilon does not count, or so small that another one is another result. With
            smallest=6.1035e-05, for machines that flush subnormal numbers (sources: M1 does, M4 to M6 do not), also
            constants that are added to sums of squares, or bound them; that is approximate.
    exact   rounding: results move by at most 2^-25 / variance of themselves (predicted from the algebra). That is half
            a unit in the last place at a variance of 2^-14, and less above; below, the variance itself moves by one
            unit of those that fp16 has there. Rows whose variance is 0 give 0, where they gave NaN.
    cost    none: the same ops with another constant.

    before
        %y: fp16[2, 3, 4, 16] = layer_norm(x=%x, axes=[-1], epsilon=9.999999960041972e-13)
    after
        %y: fp16[2, 3, 4, 16] = layer_norm(x=%x, axes=[-1], epsilon=5.960464477539063e-08)
    """

    code, slug = "ANE311", "epsilon-flushed-to-zero"
    stage = "numerics"
    after = ("scaled_rms_norm",)
    exactness = Exactness.ROUNDING
    bound = "2^-25 / variance of a result: 2^-11, half a unit in the last place, where the variance is 2^-14"
    preset = "full"
    fixes_nonfinite = True
    moves = 2.0**-11
    raises_constants = True
    within = (2.0**-6, math.inf)  # below, variances approach 2^-14, where results differ more
    roots = (
        "layer_norm", "instance_norm", "l2_norm", "batch_norm", "rsqrt", "inverse", "log", "add", "maximum", "clip",
    )
    evidence = (
        Vendor("1e-12 \"is not friendly with the float16 precision that ANE uses by default\"; 1e-7 in its place",
               source="https://github.com/apple/ml-ane-transformers ane_transformers/huggingface/distilbert.py",
               date="2022"),
        Vendor("the cast to fp16 raises constants that would become 0 to 2^-24, as 0 is \"not ideal for eps purposes\"",
               source=_FP16_CAST_SOURCE),
        Community("sums and products of 2^-24 are kept; the same notes quote a paper by which M1 flushes subnormal "
                  "numbers in matrix products and M5 does not", chip="M4, M6", date="2026-10",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md"),
        Community("where rows are zeros \"a plain 1e-6 underflows\"", date="2026-05",
                  source="https://github.com/pytorch/executorch/pull/19523"),
    )

    smallest: float = _FP16_MIN_SUBNORMAL
    "Epsilons below are raised to it; 6.1035e-05 suits machines that flush subnormal numbers, and is approximate."

    def match(self, op: Operation) -> Hit | Miss:
        least = float(np.float16(max(self.smallest, _FP16_MIN_SUBNORMAL)))
        parameter, old = find_epsilon(op)
        if old is None or not 0 <= old < least:
            return Miss(op, "no epsilon that is too small", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, f"computed in fp32, which holds {old:.3g}", near=op.op_type.endswith("_norm"))
        reason, near = find_epsilon_dependence(op, parameter, old, least)
        if reason:
            return Miss(op, reason, near=near)
        return Hit(
            op,
            parameter=parameter,
            new=least,
            exactness=None if least == _FP16_MIN_SUBNORMAL else Exactness.APPROXIMATE,
            note=f"epsilon {old:.3g} becomes {least:.3g}; results move by at most {(least - old) / 2:.3g} / "
            f"variance of themselves, less than half a unit of fp16 above a variance of {least * 1024:.3g}",
        )

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        old = getattr(hit.op, hit.parameter)
        new = np.full(old.shape, hit.new, types.nptype_from_builtin(old.dtype))[()]
        return rebuild_op(mb, hit.op, **{hit.parameter: new})

    def examples(self) -> Iterable[Example]:
        flush = {"smallest": _FP16_MIN_NORMAL}
        yield Example("epsilon in fp32", lambda: build_norm_op("layer_norm", epsilon=np.float32(1e-12)))
        yield Example("epsilon 0", lambda: build_norm_op("layer_norm", opset=15, epsilon=np.float16(0)))
        yield Example("over the picture", lambda: build_norm_op("instance_norm", epsilon=np.float32(1e-12)))
        yield Example("by its length", lambda: build_norm_op("l2_norm", epsilon=np.float32(1e-10)))
        yield Example("spelt out", lambda: build_norm_program(build_rsqrt_epsilon_norm, width=16))
        yield Example("added", lambda: build_norm_program(width=32), options=flush)
        yield Example("bound", lambda: build_norm_program(build_torch_normalize, width=32), options=flush)
        yield Example("root read by others", lambda: build_norm_program(build_observed_norm),
                      reason="the root is read by others than products, and at 0 it is the epsilon's")
        yield Example("of another value", lambda: build_norm_program(build_unrelated_product),
                      reason="what is divided is not what was squared: where that is 0, the result is the epsilon's")
        yield Example("large enough", lambda: build_norm_op("layer_norm", epsilon=np.float32(1e-5)),
                      reason="no epsilon that is too small")
        yield Example("in fp32", lambda: build_norm_op("layer_norm", np.float32, epsilon=np.float32(1e-12)),
                      reason="computed in fp32, which holds 1e-12")
        yield Example("variances known", lambda: build_batch_norm(0.5),
                      reason="beside variances from 0.5 an epsilon of 1e-12 does not count")
        yield Example("no variance", lambda: build_batch_norm(0.0),
                      reason="beside a variance of 0 another epsilon than 1e-12 gives another result")
        yield Example("logarithm", lambda: build_norm_program(build_logarithm),
                      reason="at 0 the result of log is that of an epsilon of 1e-10")
        yield Example("other root", lambda: build_norm_program(build_reciprocal_root),
                      reason="at 0 the result of rsqrt is that of an epsilon of 1e-12")
        yield Example("fraction of a sum", lambda: build_norm_program(build_fraction), options=flush,
                      reason="at 0 the result of add is that of an epsilon of 5.96e-08")


def find_epsilon(op: Operation) -> tuple[str, float | None]:
    """Return the input of `op` that is an epsilon, and its value; ("", None) where it has no epsilon."""
    if op.op_type in ("add", "maximum"):
        for parameter in ("y", "x"):
            found = read_positive_scalar(getattr(op, parameter))
            if found is not None:
                return parameter, found
        return "", None
    parameter = "alpha" if op.op_type == "clip" else "epsilon"
    var = getattr(op, parameter)
    if var is None or not is_const(var) or (op.op_type == "clip" and read_positive_scalar(var) is None):
        return "", None
    return parameter, float(get_const_value(var))


def find_epsilon_dependence(op: Operation, parameter: str, old: float, least: float) -> tuple[str, bool]:
    """Return (reason, near): why the epsilon `least` for `old` might change the result, and whether to report it.

    The reason is "" where the result stays the same.
    """
    if op.op_type in _NORM_OPS:
        return "", True
    if op.op_type == "batch_norm":
        return _find_batch_norm_dependence(op, old, least)
    source: Var = op.x if parameter != "x" else op.y
    if op.op_type in ("add", "maximum", "clip"):
        readers = get_consumers(op.outputs[0])
        if not readers or not all(_is_division_by(reader, op.outputs[0]) for reader in readers):
            return "nothing is divided by it", False
    elif source.op is not None and source.op.op_type in ("add", "maximum", "clip"):
        return "something is added to the operand already", False
    if op.op_type == "log" and old < _MIN_EXPLICIT_EPSILON:
        return "an epsilon that says there is none", False
    norm = None if op.op_type == "log" else match_norm(source, 2) or match_norm(source, 1)
    if norm is None:
        return f"at 0 the result of {op.op_type} is that of an epsilon of {old:.3g}", True
    if any(kind in ("add", "maximum") and given >= least for kind, given in norm.steps):
        return "beside the epsilon there is already this one does not count", False
    if op.op_type in ("rsqrt", "inverse") and not _is_only_multiplied(op.outputs[0]):
        return "the root is read by others than products, and at 0 it is the epsilon's", True
    if not _is_divisor_only(op.outputs[0], norm.x):
        return "what is divided is not what was squared: where that is 0, the result is the epsilon's", True
    return "", True


def _is_division_by(reader: Operation, var: Var) -> bool:
    return reader.op_type in _DIVIDING_OPS and (reader.op_type != "real_div" or reader.y is var)


def _is_only_multiplied(var: Var) -> bool:
    return not var.consuming_blocks and all(reader.op_type == "mul" for reader in get_consumers(var))


def _is_divisor_only(var: Var, x: Var) -> bool:
    """Return whether `var`, a power of the norm of `x`, is used only to divide multiples of `x`."""
    pending = [var]
    while pending:
        power = pending.pop()
        if power.consuming_blocks:
            return False
        for reader in get_consumers(power):
            other = (reader.y if reader.x is power else reader.x) if reader.op_type in _BINARY_STEPS else None
            over = reader.op_type == "real_div" and reader.y is power
            if (reader.op_type == "mul" or over) and _is_multiple_of(other, x):
                continue
            if reader.op_type == "pow":
                other = reader.y
            if reader.op_type not in _BINARY_STEPS + _UNARY_STEPS or not (other is None or is_const(other)):
                return False
            if reader.op_type == "pow" and np.max(np.abs(reader.y.val)) > 1:
                return False
            pending.append(reader.outputs[0])
    return True


def _is_multiple_of(var: Var | None, x: Var) -> bool:
    """Return whether `var` is `x` times some factor, so that it is 0 where `x` is."""
    pending = [(var, _MAX_PRODUCT_DEPTH)]
    while pending:
        one, depth = pending.pop()
        if one is x:
            return True
        if one is None or one.op is None or not depth:
            continue
        if one.op.op_type in ("mul", "real_div"):
            pending.append((one.op.x, depth - 1))
        if one.op.op_type == "mul":
            pending.append((one.op.y, depth - 1))
    return False


def _find_batch_norm_dependence(op: Operation, old: float, least: float) -> tuple[str, bool]:
    if op.variance.val is None:
        return "the variances are compressed", True
    variance = float(np.min(op.variance.val))
    if variance >= least * _NEGLIGIBLE_EPSILON_RATIO:
        return f"beside variances from {variance:.3g} an epsilon of {old:.3g} does not count", True
    return f"beside a variance of {variance:.3g} another epsilon than {old:.3g} gives another result", True
