"""Raise the epsilons of norms that fp16 flushes to zero."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_const
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity, Vendor
from ...passes.examples import make_op_example
from ._norm_patterns import make_norm_example, match_norm, read_positive_scalar

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
"Smallest epsilon that counts as one: coremltools' default for log is smaller, and means no epsilon."
_NEGLIGIBLE_EPSILON_RATIO = 2.0**10
"Ratio of a variance to an epsilon from which adding the epsilon moves it by half a unit of fp16 at most."
_SHAPE = (2, 3, 4, 16)
"Shape of the input of the examples of one op."


class RepresentableEpsilon(Rewrite):
    """Raise an epsilon that fp16 flushes to zero to the smallest fp16 number.

    why     Computed in fp16, an epsilon below 2^-25 is 0: a row without variance divides 0 by 0. coremltools'
            conversion to fp16 raises such epsilons to 2^-24, but not those kept in fp32 (from iOS17) or written by
            other tools.
    when    the epsilon of layer_norm, instance_norm and l2_norm in fp16, and of a rsqrt whose root of a sum of squares
            is only multiplied with what was squared. There the numerator is 0 if the epsilon matters. Not for log and
            other roots, whose result at 0 depends on the epsilon. Not for batch_norm: its variances are constant, and
            either so large that the epsilon has no effect, or so small that another one changes the result. With
            smallest=6.1035e-05, for machines that flush subnormal numbers (sources: M1 does, M4 to M6 do not), also
            constants that are added to sums of squares, or are their lower bound; this is approximate.
    exact   rounding: results move by at most 2^-25 / variance of themselves (predicted from the algebra). That is half
            a unit in the last place at a variance of 2^-14, and less above it; below it the variance is a subnormal
            number, which moves by one unit in the last place. Rows whose variance is 0 give 0, where they gave NaN.
    cost    none: the same ops with another constant.

    before
        %y: fp16[2, 3, 4, 16] = layer_norm(x=%x, axes=[-1], epsilon=9.999999960041972e-13)
    after
        %y: fp16[2, 3, 4, 16] = layer_norm(x=%x, axes=[-1], epsilon=5.960464477539063e-08)
    """

    code, slug = "ANE311", "epsilon-flushed-to-zero"
    severity = Severity.WRONG
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
    """Epsilons below this value are raised to it; 6.1035e-05 is for machines that flush subnormal numbers, and
    approximate."""

    def match(self, op: Operation) -> Hit | Miss:
        new = float(np.float16(max(self.smallest, _FP16_MIN_SUBNORMAL)))
        parameter, old = _find_epsilon(op)
        if old is None or not 0 <= old < new:
            return Miss(op, "no epsilon that is too small", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, f"computed in fp32, which represents {old:.3g}", near=op.op_type.endswith("_norm"))
        reason, near = _find_epsilon_dependence(op, parameter, old, new)
        if reason:
            return Miss(op, reason, near=near)
        return Hit(
            op,
            parameter=parameter,
            new=new,
            exactness=None if new == _FP16_MIN_SUBNORMAL else Exactness.APPROXIMATE,
            note=f"epsilon {old:.3g} becomes {new:.3g}; results move by at most {(new - old) / 2:.3g} / "
            f"variance of themselves, less than half a unit of fp16 above a variance of {new * 1024:.3g}",
        )

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        old = getattr(hit.op, hit.parameter)
        new = np.full(old.shape, hit.new, types.nptype_from_builtin(old.dtype))[()]
        return rebuild_op(mb, hit.op, **{hit.parameter: new})

    def examples(self) -> Iterable[Example]:
        flush = {"smallest": _FP16_MIN_NORMAL}
        yield _make_op_example("epsilon in fp32", "layer_norm", 1e-12)
        yield make_op_example("epsilon 0", "layer_norm", _SHAPE, {"epsilon": np.float16(0), "axes": [-1]},
                              opset=ct.target.iOS15)
        yield _make_op_example("over the picture", "instance_norm", 1e-12)
        yield _make_op_example("by its length", "l2_norm", 1e-10)
        yield make_norm_example("spelt out", _build_rsqrt_epsilon_norm, width=16)
        yield make_norm_example("added", width=32, options=flush)
        yield make_norm_example("bound", _build_torch_normalize, width=32, options=flush)
        yield make_norm_example("root read by others", _build_observed_norm,
                                reason="the root has users other than products, and at 0 it depends on the epsilon")
        yield make_norm_example(
            "of another value", _build_unrelated_product,
            reason="the dividend is not the squared value: if that is 0, the result depends on the epsilon")
        yield _make_op_example("large enough", "layer_norm", 1e-5, reason="no epsilon that is too small")
        yield _make_op_example("in fp32", "layer_norm", 1e-12, dtype=types.fp32,
                               reason="computed in fp32, which represents 1e-12")
        yield _make_op_example("variances known", "batch_norm", 1e-12, _make_statistics(0.5),
                               reason="with variances from 0.5 on an epsilon of 1e-12 has no effect")
        yield _make_op_example("no variance", "batch_norm", 1e-12, _make_statistics(0.0),
                               reason="with a variance of 0 an epsilon other than 1e-12 changes the result")
        yield make_norm_example("logarithm", _build_logarithm,
                                reason="at 0 the result of log is that of an epsilon of 1e-10")
        yield make_norm_example("other root", _build_reciprocal_root,
                                reason="at 0 the result of rsqrt is that of an epsilon of 1e-12")
        yield make_norm_example("fraction of a sum", _build_fraction, options=flush,
                                reason="at 0 the result of add is that of an epsilon of 5.96e-08")


def _find_epsilon(op: Operation) -> tuple[str, float | None]:
    """Return the input of `op` that is an epsilon, and its value; ("", None) where it has no epsilon."""
    if op.op_type in ("add", "maximum"):
        for parameter in ("y", "x"):
            number = read_positive_scalar(getattr(op, parameter))
            if number is not None:
                return parameter, number
        return "", None
    parameter = "alpha" if op.op_type == "clip" else "epsilon"
    var = getattr(op, parameter)
    if var is None or not is_const(var) or (op.op_type == "clip" and read_positive_scalar(var) is None):
        return "", None
    return parameter, float(get_const_value(var))


def _find_epsilon_dependence(op: Operation, parameter: str, old: float, new: float) -> tuple[str, bool]:
    """Return (reason, near): why the epsilon `new` for `old` might change the result, and whether to report it.

    The reason is "" where the result stays the same.
    """
    if op.op_type in _NORM_OPS:
        return "", True
    if op.op_type == "batch_norm":
        return _find_batch_norm_dependence(op, old, new)
    source: Var = op.x if parameter != "x" else op.y
    if op.op_type in ("add", "maximum", "clip"):
        readers = get_consumers(op.outputs[0])
        if not readers or not all(_is_division_by(reader, op.outputs[0]) for reader in readers):
            return "nothing is divided by it", False
    elif source.op is not None and source.op.op_type in ("add", "maximum", "clip"):
        return "the operand has an addend already", False
    if op.op_type == "log" and old < _MIN_EXPLICIT_EPSILON:
        return "an epsilon that means none", False
    norm = None if op.op_type == "log" else match_norm(source, 2) or match_norm(source, 1)
    if norm is None:
        return f"at 0 the result of {op.op_type} is that of an epsilon of {old:.3g}", True
    if any(kind in ("add", "maximum") and number >= new for kind, number in norm.steps):
        return "this epsilon has no effect next to the other one", False
    if op.op_type in ("rsqrt", "inverse") and not _is_only_multiplied(op.outputs[0]):
        return "the root has users other than products, and at 0 it depends on the epsilon", True
    if not _is_divisor_only(op.outputs[0], norm.x):
        return "the dividend is not the squared value: if that is 0, the result depends on the epsilon", True
    return "", True


def _find_batch_norm_dependence(op: Operation, old: float, new: float) -> tuple[str, bool]:
    if op.variance.val is None:
        return "the variances are compressed", True
    variance = float(np.min(op.variance.val))
    if variance >= new * _NEGLIGIBLE_EPSILON_RATIO:
        return f"with variances from {variance:.3g} on an epsilon of {old:.3g} has no effect", True
    return f"with a variance of {variance:.3g} an epsilon other than {old:.3g} changes the result", True


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
            kind = reader.op_type
            if kind not in _BINARY_STEPS + _UNARY_STEPS:
                return False
            other = None  # the other operand
            if kind in _BINARY_STEPS:
                other = reader.y if reader.x is power else reader.x
            elif kind == "pow":
                other = reader.y
            is_use = kind == "mul" or (kind == "real_div" and reader.y is power)
            if is_use and _is_multiple_of(other, x):
                continue
            if other is not None and not is_const(other):
                return False
            if kind == "pow" and np.max(np.abs(reader.y.val)) > 1:
                return False
            pending.append(reader.outputs[0])
    return True


def _is_multiple_of(var: Var | None, x: Var) -> bool:
    """Return whether `var` is `x` times some factor, so that it is 0 where `x` is."""
    pending = [(var, _MAX_PRODUCT_DEPTH)]
    while pending:
        factor, depth = pending.pop()
        if factor is x:
            return True
        if factor is None or factor.op is None or not depth:
            continue
        if factor.op.op_type in ("mul", "real_div"):
            pending.append((factor.op.x, depth - 1))
        if factor.op.op_type == "mul":
            pending.append((factor.op.y, depth - 1))
    return False


def _make_op_example(
    name: str, op_type: str, epsilon: float, parameters: dict[str, Any] | None = None, **settings: Any
) -> Example:
    """Make an example of one normalization op with its own epsilon, in fp32."""
    axes = {"axes": [-1]} if op_type == "layer_norm" else {}
    parameters = {**(parameters or {}), "epsilon": np.float32(epsilon), **axes}
    return make_op_example(name, op_type, _SHAPE, parameters, **settings)


def _make_statistics(variance: float) -> dict[str, Any]:
    return {"mean": np.zeros(3, np.float32), "variance": np.full(3, variance, np.float32)}


def _build_rsqrt_epsilon_norm(x: Var, number: Any) -> Any:
    """Build a norm whose only epsilon is that of rsqrt."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12), name="root"), name="y")


def _build_observed_norm(x: Var, number: Any) -> list[Var]:
    y = _build_rsqrt_epsilon_norm(x, number)
    return [y, Builder.identity(x=y.op.y, name="z")]


def _build_unrelated_product(x: Var, number: Any) -> Any:
    """Multiply another value by the root of the mean of squares of x."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=Builder.cos(x=x), y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12)), name="y")


def _build_torch_normalize(x: Var, number: Any) -> Any:
    """Build a norm as torch's normalize."""
    norm = Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.maximum(x=norm, y=number(_FP16_MIN_SUBNORMAL)), name="y")


def _build_fraction(x: Var, number: Any) -> Any:
    total = Builder.reduce_sum(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.add(x=total, y=number(_FP16_MIN_SUBNORMAL)), name="y")


def _build_logarithm(x: Var, number: Any) -> Any:
    return Builder.log(x=Builder.square(x=x), epsilon=np.float32(1e-10), name="y")


def _build_reciprocal_root(x: Var, number: Any) -> Any:
    return Builder.rsqrt(x=Builder.abs(x=x), epsilon=np.float32(1e-12), name="y")
