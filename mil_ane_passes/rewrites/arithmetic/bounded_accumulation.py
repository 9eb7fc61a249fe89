"""Keep the partial sums of convolutions and matrix products within the range of the ANE's accumulator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import is_const
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.examples import make_example, make_weight

_ACCUMULATOR_LIMIT = 32768.0
"Magnitude from which a partial sum becomes infinite."
_FP16_MAX = 65504.0
"The largest finite number of fp16."
_MAX_EXPONENT = 15
"Exponent of the largest power of two in fp16, by which a result is multiplied back."
_FACTOR_INPUTS = {
    "conv": ("x", "weight"),
    "conv_transpose": ("x", "weight"),
    "linear": ("x", "weight"),
    "matmul": ("x", "y"),
}
"The two inputs of each op whose products are summed."
Array = np.ndarray[Any, Any]


class BoundedAccumulation(Rewrite):
    """Scale conv, linear and matmul whose partial sums exceed 32768, where the ANE's accumulator overflows.

    why     The accumulator has half of fp16's range: once a partial sum, including the bias, reaches 32768, the result
            is infinite, even if the final sum is small.
    when    Ranges are measured on the user's feeds or ranges: the sum of the magnitudes of the products of an element,
            which bounds every partial sum in any order, times `margin` reaches 32768. Without measurements nothing is
            rewritten, but a bias of 32768 or more is reported. fp16 only, conv_transpose, too. The result has to fit
            fp16; a bias, except that of linear, must not be compressed.
    exact   rounding: a constant factor without other users is divided by a power of two if that keeps every bit,
            otherwise x in an additional op, and the result is multiplied back. (Splitting the contracted axis covers
            fewer cases: a part, or the sum of some parts, may exceed the limit.)
    cost    one elementwise op, another one if x is scaled, and another one for a bias that would lose bits; a new
            weight of the same size replaces the old one.

    before
        %y: fp16[1, 4, 4, 4] = conv(x=%x, weight=<fp16[4, 8, 3, 3]>, bias=[32.0, 32.0, 32.0, 32.0])
    after
        %0: fp16[1, 4, 4, 4] = conv(x=%x, weight=<fp16[4, 8, 3, 3]>, bias=[4.0, 4.0, 4.0, 4.0])
        %y: fp16[1, 4, 4, 4] = mul(x=%0, y=8.0)
    """

    code, slug = "ANE312", "partial-sums-beyond-32768"
    severity = Severity.WRONG
    stage = "numerics"
    after = ("fuse_linear_convs",)
    exactness = Exactness.ROUNDING
    bound = ("half a unit in the last place; a scaled x or result below 2**-14 is off by up to 2**-25, times the power "
             "of two that brings it back")
    preset = "full"
    measures = True
    fixes_nonfinite = True
    roots = ("conv", "conv_transpose", "linear", "matmul")
    evidence = (
        Community("a partial sum or bias of 32768 makes the result infinite for good", chip="M4, M6",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6@60d79c2: notes/numerics.md, "
                         "notes/defects.md", date="2026"),
        Community("matrix products above about 32752 are infinite (not through Core ML)", chip="M2 Pro, M5",
                  source="sbryngelson/ANEForge docs/numeric-cliffs.md", date="2026"),
    )

    margin: float = 2.0
    "Safety factor: the measured bound times this factor must stay below 32768, because other inputs may be larger."

    def match(self, op: Operation) -> Hit | Miss:
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, "not computed in fp16", near=False)
        measured = None if self.measured is None else self.measured.get(op.outputs[0])
        if measured is None or measured.partial is None:
            return self._make_unmeasured_miss(op)
        reach = measured.partial * self.margin
        if reach < _ACCUMULATOR_LIMIT:
            return Miss(op, "partial sums stay within 32768", near=False)
        if not measured.finite or measured.largest > _FP16_MAX:
            return Miss(op, f"the result itself reaches {measured.largest:.4g}, above the fp16 maximum of 65504: keep "
                            f"it in fp32 or scale earlier values")
        if not reach < _ACCUMULATOR_LIMIT * 2.0**_MAX_EXPONENT:
            return Miss(op, f"partial sums reach {reach:.4g} with the margin: no power of two in fp16 brings them back")
        if op.op_type != "linear" and op.inputs.get("bias") is not None and not is_const(op.bias):
            return Miss(op, "bias is compressed: it can neither be scaled nor added separately")
        exponent = max(1, math.floor(math.log2(reach / _ACCUMULATOR_LIMIT)) + 1)
        return Hit(op, note=f"partial sums up to {measured.partial:.4g}, the ANE's limit is 32768; scaled down by "
                            f"a factor of {2**exponent}", exponent=exponent)

    def _make_unmeasured_miss(self, op: Operation) -> Miss:
        bias = op.inputs.get("bias")
        reach = float(np.abs(bias.val).max(initial=0.0)) if is_const(bias) else 0.0
        if reach < _ACCUMULATOR_LIMIT:
            return Miss(op, "not measured: give feeds or ranges", near=False)
        return Miss(op, f"the bias reaches {reach:.4g}, the limit of sums is 32768; give feeds or ranges to set the "
                        f"scale")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return _build_scaled_op(mb, hit.op, hit.exponent)

    def examples(self) -> Iterable[Example]:
        yield _make_conv_example("conv", scale=64.0)
        yield make_example(
            "linear", lambda x: Builder.linear(x=x, weight=make_weight(4, 8) * np.float16(512), name="y"), scale=64.0,
            x=(3, 8))
        yield make_example("matmul", _build_matmul, scale=64.0, x=(2, 3, 8), z=(2, 8, 8))
        yield _make_conv_example("small", reason="partial sums stay within 32768")
        yield _make_conv_example("not measured", measured=False, reason="not measured: give feeds or ranges")
        yield _make_conv_example(
            "large bias", bias=40000.0, measured=False,
            reason="the bias reaches 4e+04, the limit of sums is 32768; give feeds or ranges to set the scale")
        yield make_example(
            "far beyond", _build_matmul, scale=64.0, options={"margin": 1e6}, x=(2, 3, 8), z=(2, 8, 8),
            reason="partial sums reach 3.132e+10 with the margin: no power of two in fp16 brings them back")
        yield make_example(
            "fp32",
            lambda x: Builder.relu(x=Builder.linear(x=x, weight=make_weight(4, 8, dtype=np.float32)), name="y"),
            scale=1e6,
            reason="not computed in fp16",
            dtype=types.fp32,
            x=(3, 8),
        )


def _build_scaled_op(mb: RewriteBuilder, op: Operation, exponent: int) -> Var:
    """Rebuild `op` with its sums 2**exponent times smaller, and multiply the result back afterwards.

    The constant factor is scaled where that keeps every bit and `op` is its only reader; another reader would need the
    old constant beside the new one. Otherwise x is scaled by a mul before the op.
    """
    changed: dict[str, Any] = {}
    scalable = [name for name in _FACTOR_INPUTS[op.op_type] if _is_only_reader(op, op.inputs[name])
                and _is_exactly_scalable(op.inputs[name], exponent)]
    if scalable:
        changed[scalable[0]] = _scale_down_const(mb, op.inputs[scalable[0]], exponent)
    else:
        changed["x"] = mb.mul(x=op.inputs["x"], y=_make_power_of_two(op.inputs["x"], -exponent))
    bias = op.inputs.get("bias")
    add_bias_last = bias is not None and not _is_exactly_scalable(bias, exponent)
    if bias is not None:
        changed["bias"] = None if add_bias_last else _scale_down_const(mb, bias, exponent)
    result: Var = mb.mul(x=rebuild_op(mb, op, **changed), y=_make_power_of_two(op.outputs[0], exponent))
    return mb.add(x=result, y=mb.reshaped(bias, _compute_bias_shape(op))) if add_bias_last else result


def _is_only_reader(op: Operation, var: Var) -> bool:
    others = (reader for reader in var.child_ops if reader is not op and reader.enclosing_block is not None)
    return next(others, None) is None and not var.consuming_blocks


def _is_exactly_scalable(var: Var, exponent: int) -> bool:
    """Return whether `var` is a const that times 2**-exponent is exact in its own dtype: no small number loses bits."""
    if not is_const(var):
        return False
    array = np.asarray(var.val)
    return bool(np.array_equal(_divide_by_power(array, exponent) * array.dtype.type(2**exponent), array))


def _scale_down_const(mb: RewriteBuilder, var: Var, exponent: int) -> Var:
    return mb.weight(var, f"over_{2**exponent}", lambda: _divide_by_power(np.asarray(var.val), exponent))


def _divide_by_power(array: Array, exponent: int) -> Array:
    quotient: Array = (array * array.dtype.type(2.0**-exponent)).astype(array.dtype)
    return quotient


def _make_power_of_two(var: Var, exponent: int) -> np.generic:
    power: np.generic = types.nptype_from_builtin(var.dtype)(2.0**exponent)
    return power


def _compute_bias_shape(op: Operation) -> tuple[int, ...]:
    """Return the shape in which a bias is added to the output: one number a channel."""
    if op.op_type == "linear":
        return (int(op.bias.shape[0]),)
    return (1, int(op.bias.shape[0]), *[1] * (op.x.rank - 2))


def _make_conv_example(name: str, bias: float = 32.0, **settings: Any) -> Example:
    weight, biases = make_weight(4, 8, 3, 3) * np.float16(64), np.full(4, bias, dtype=np.float16)
    return make_example(
        name, lambda x: Builder.conv(x=x, weight=weight, bias=biases, name="y"), x=(1, 8, 6, 6), **settings)


def _build_matmul(x: Var, z: Var) -> Any:
    return Builder.mul(x=Builder.matmul(x=x, y=z), y=np.float16(0.5), name="y")
