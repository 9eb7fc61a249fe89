"""Norms: match a value over the root of a mean or sum of squares in all its forms, and build it again scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_symbolic
from ...passes.examples import build_program

__all__ = [
    "FP16_MIN_NORMAL",
    "Norm",
    "build_batch_norm",
    "build_computed_sum_norm",
    "build_divided_norm",
    "build_dropped_axes_norm",
    "build_fraction",
    "build_l2_norm",
    "build_largest_magnitude",
    "build_logarithm",
    "build_norm_op",
    "build_norm_program",
    "build_observed_norm",
    "build_plain_l2_norm",
    "build_prescaled_norm",
    "build_reciprocal_norm",
    "build_reciprocal_root",
    "build_restored_axes_norm",
    "build_rsqrt_epsilon_norm",
    "build_shared_factor_norm",
    "build_tanh_norm",
    "build_torch_normalize",
    "build_unrelated_product",
    "match_norm",
    "rebuild_scaled_factor",
]


FP16_MIN_NORMAL = 2.0**-14
"The smallest normal number of fp16; a divisor never gets smaller."
_FP16_MAX = 65504.0
"The largest finite number of fp16."
_MAX_COUNT = 16384
"Most numbers in a mean. If the largest is 1, the mean of the squares is at least 1 / count, normal in fp16."
_MAX_SQUARE_SUM = 32768.0
"Limit of the scaled sum of squares of numbers up to 1."
_RELATIVE_TOLERANCE = 2.0**-19
"Relative error of a factor in fp16 from which the rest is added as a second term."
_INFINITY_THRESHOLD = 1e38
"Upper bound of a clip above which it has no effect."
_MAX_DEPTH = 10
"Most ops between the squares and the division that are followed."
_MIN_EPSILON = 2.0**-42
"Smallest epsilon with a counterpart in fp16; see `_factor_epsilon`."
_DEFAULT_EPSILONS = {"rsqrt": 1e-12, "inverse": 1e-4}
_REDUCTION_OPS = ("reduce_mean", "reduce_sum", "reduce_sum_square", "reduce_l2_norm")


@dataclass
class Norm:
    """A norm: `x` is squared, `reduce` is the op that sums; `steps` (kind, number) lead from the sum to the factor.

    `degree` is the power of x with which the factor grows: 1 where it is divided by, -1 where it is multiplied with.
    `refusal` is why the norm cannot be rebuilt, or None.
    """

    x: Var
    reduce: Operation
    steps: list[tuple[str, float]] = field(default_factory=list)
    degree: int = 2
    refusal: str | None = None

    @property
    def kept(self) -> tuple[object, ...]:
        """The shape of the sum when it keeps its axes."""
        source = self.reduce.x
        axes = {axis % source.rank for axis in get_const_value(self.reduce.axes) or range(source.rank)}
        return tuple(1 if axis in axes else extent for axis, extent in enumerate(source.shape))

    @property
    def count(self) -> int | None:
        """The number of summed elements; None where it is symbolic."""
        source = self.reduce.x
        axes: list[int] = get_const_value(self.reduce.axes) or list(range(source.rank))
        extents = [source.shape[axis] for axis in axes]
        return None if any(map(is_symbolic, extents)) else math.prod(int(extent) for extent in extents)


def match_norm(factor: Var, degree: int) -> Norm | None:
    """Match the norm that `factor` is the power `degree` (1 or -1) of; None where it is not a power of a norm."""
    path: list[Operation] = []
    foreign: str | None = None
    var = factor
    for _ in range(_MAX_DEPTH):
        op = var.op
        if op is None:
            return None
        if op.op_type in _REDUCTION_OPS:
            return _parse_norm(op, path, foreign, degree, factor)
        if op.op_type in ("expand_dims", "reshape"):  # only the final shape is checked
            var = op.x
            continue
        inner = _find_step_input(op)
        if inner is None and op.op_type in ("add", "maximum", "mul"):  # followed only for the reason of the miss
            inner, foreign = op.x, f"{op.op_type} gives '{op.outputs[0].name}', but not with a constant number above 0"
        if op.op_type == "cast":
            inner, foreign = op.x, f"a cast gives '{op.outputs[0].name}': the norm is in two precisions"
        if inner is None or inner.shape != op.outputs[0].shape:
            return None
        path.append(op)
        var = inner
    return None


def _find_step_input(op: Operation) -> Var | None:
    """Return the input of a step on the path from the sum to the factor, None where `op` is not such a step."""
    if op.op_type in ("sqrt", "rsqrt", "inverse"):
        return op.x
    if op.op_type == "pow":
        return op.x if _read_exponent(op) in (0.5, -0.5) else None
    if op.op_type == "clip":
        return (
            op.x
            if read_positive_scalar(op.alpha) is not None and get_const_value(op.beta, 0.0) > _INFINITY_THRESHOLD
            else None
        )
    if op.op_type in ("add", "maximum", "mul", "real_div"):
        for one, other in ((op.x, op.y), (op.y, op.x)):
            if read_positive_scalar(other) is not None:
                return one
    return None


def _read_exponent(op: Operation) -> float | None:
    """Return the exponent of a `pow` where it is one constant number."""
    return float(np.asarray(op.y.val).reshape(-1)[0]) if is_const(op.y) and math.prod(op.y.shape) == 1 else None


def read_positive_scalar(var: Var | None) -> float | None:
    """Return the value of a constant of one element where it is positive and finite, else None."""
    if var is None or not is_const(var) or math.prod(var.shape) != 1:  # called for every factor: do not read weights
        return None
    found = float(np.asarray(var.val).reshape(-1)[0])
    return found if 0 < found < math.inf else None


def _parse_norm(
    reduce: Operation, path: list[Operation], foreign: str | None, degree: int, factor: Var
) -> Norm | None:
    x = _find_squared_value(reduce)
    if x is None:
        return None
    norm = Norm(x, reduce, degree=1 if reduce.op_type == "reduce_l2_norm" else 2)
    if foreign is None:
        if not all(_append_step(norm, op) for op in reversed(path)) or norm.degree != degree:
            return None
    elif not any(op.op_type in ("sqrt", "rsqrt", "pow") for op in path):
        return None
    norm.refusal = _find_norm_obstacle(norm, foreign, factor)
    return norm


def _find_squared_value(reduce: Operation) -> Var | None:
    """Return the value whose squares `reduce` sums, or None."""
    if reduce.op_type in ("reduce_sum_square", "reduce_l2_norm"):
        return reduce.x
    op = reduce.x.op
    if op is None or op.op_type not in ("square", "mul", "pow"):
        return None
    if op.op_type == "mul" and op.x is not op.y or op.op_type == "pow" and _read_exponent(op) != 2:
        return None
    squared: Var = op.x
    return squared if squared.shape == op.outputs[0].shape else None  # a pow may add axes, as with an exponent [[[2]]]


def _append_step(norm: Norm, op: Operation) -> bool:
    """Append the step that `op` computes; return False where the result is not a power of a norm."""
    kind = op.op_type
    if kind == "pow":
        kind = "sqrt" if _read_exponent(op) == 0.5 else "rsqrt"
    if kind in ("sqrt", "rsqrt", "inverse"):
        _append_epsilon(
            norm,
            float(get_const_value(op.epsilon, _DEFAULT_EPSILONS[kind])) if op.op_type in _DEFAULT_EPSILONS else 0.0,
        )
        return _append_power(norm, kind)
    if kind == "clip":  # without an upper bound
        norm.steps.append(("maximum", float(get_const_value(op.alpha))))
        return norm.degree > 0
    given, over = read_positive_scalar(op.y), op.op_type == "real_div"
    if given is None:
        given = read_positive_scalar(op.x)
        over = False
    assert given is not None
    if kind == "add":
        _append_epsilon(norm, given)
    elif kind == "maximum" or over or kind == "mul":
        norm.steps.append(("over" if over else kind, given))
    else:
        norm.steps += [("inverse", 0.0), *([("mul", given)] if given != 1 else [])]
        norm.degree = -norm.degree
    return norm.degree > 0 or kind not in ("add", "maximum")


def _append_epsilon(norm: Norm, epsilon: float) -> None:
    if epsilon > 0 and norm.steps and norm.steps[-1][0] == "add":
        epsilon += norm.steps.pop()[1]
    if epsilon > 0:
        norm.steps.append(("add", epsilon))


def _append_power(norm: Norm, kind: str) -> bool:
    if kind != "inverse" and abs(norm.degree) != 2:
        return False
    if norm.degree < 0 and norm.steps and norm.steps[-1][0] == "add":
        return False
    norm.steps.append((kind, 0.0))
    norm.degree = {"sqrt": norm.degree // 2, "rsqrt": -norm.degree // 2, "inverse": -norm.degree}[kind]
    return True


def _find_norm_obstacle(norm: Norm, foreign: str | None, factor: Var) -> str | None:
    if _is_scaled(norm.x):
        return "x is divided by its largest magnitude already"
    if norm.reduce.op_type == "reduce_l2_norm":
        return "reduce_l2_norm squares inside, which is reported to stay stable"
    if foreign is not None:
        return foreign
    if tuple(factor.shape) != norm.kept:
        return "the root is brought to another shape than that of a sum that keeps its axes"
    count = norm.count
    if count is None:
        return "the sum is over a symbolic dimension"
    if count > _MAX_COUNT:
        return (
            f"the sum is over {count} numbers, above {_MAX_COUNT}: of numbers up to 1 its parts are too small for fp16"
        )
    top = 1.0 if norm.reduce.op_type == "reduce_mean" else float(count)
    for kind, given in norm.steps:
        top = top * given if kind == "mul" else top / given if kind == "over" else top
        if kind in ("add", "maximum") and given < _MIN_EPSILON:
            return f"an epsilon of {given:.3g} has no counterpart in fp16"
        if top > _MAX_SQUARE_SUM:
            return f"multiplied by {given:.6g} the sum of squares of numbers up to 1 may pass {_MAX_SQUARE_SUM:.0f}"
    return None


def _is_scaled(x: Var) -> bool:
    """Return whether `x` was divided by a value computed from a maximum."""
    if x.op is None or x.op.op_type != "real_div":
        return False
    by = x.op.y
    for _ in range(_MAX_DEPTH):
        if by.op is None or by.op.op_type not in ("clip", "maximum", "add"):
            break
        by = by.op.x
    return by.op is not None and by.op.op_type == "reduce_max"


def build_largest_magnitude(mb: RewriteBuilder, norm: Norm) -> Var:
    """Build the largest magnitude of each row of x, finite and not below the scale of the epsilons."""
    floor = max([FP16_MIN_NORMAL, *(_factor_epsilon(given, degree)[0] for given, degree in _collect_epsilons(norm))])
    axes, x = norm.reduce.axes, norm.x
    key = None if axes is None else tuple(get_const_value(axes))

    def make() -> Var:
        most = mb.reduce_max(x=mb.abs(x=x), axes=axes, keep_dims=True)
        made: Var = mb.clip(x=most, alpha=np.float16(floor), beta=np.float16(_FP16_MAX))
        return made

    made: Var = mb.once(("largest", x, key, floor), make)
    return made


def rebuild_scaled_factor(mb: RewriteBuilder, norm: Norm, scaled: Var, most: Var) -> Var:
    """Rebuild the factor for `scaled`, which is x divided by `most`, by the same steps.

    Each epsilon is divided by the power of `most` with which the sum of squares grows at that point.
    """
    made: Var
    if norm.reduce.op_type == "reduce_sum_square":
        made = mb.reduce_sum_square(x=scaled, axes=norm.reduce.axes, keep_dims=True)
    else:
        make = mb.reduce_mean if norm.reduce.op_type == "reduce_mean" else mb.reduce_sum
        made = make(x=mb.square(x=scaled), axes=norm.reduce.axes, keep_dims=True)
    degree = 2
    for kind, given in norm.steps:
        if kind in ("add", "maximum"):
            made = (mb.add if kind == "add" else mb.maximum)(x=made, y=_build_scaled_epsilon(mb, given, degree, most))
        elif kind in ("mul", "over"):
            made = (mb.mul if kind == "mul" else mb.real_div)(x=made, y=np.float16(given))
        else:
            made = mb.sqrt(x=made) if kind == "sqrt" else getattr(mb, kind)(x=made, epsilon=np.float16(0))
            degree = {"sqrt": degree // 2, "rsqrt": -degree // 2, "inverse": -degree}[kind]
    return made


def _collect_epsilons(norm: Norm) -> list[tuple[float, int]]:
    """Collect each epsilon and the power of x that it is added to."""
    found, degree = [], 2
    for kind, given in norm.steps:
        if kind in ("add", "maximum"):
            found.append((given, degree))
        degree = {"sqrt": degree // 2, "rsqrt": -degree // 2, "inverse": -degree}.get(kind, degree)
    return found


def _factor_epsilon(epsilon: float, degree: int) -> tuple[float, float]:
    """Return (s, c) with epsilon = c * s ** degree: s a power of two that is normal in fp16, c a number near 1."""
    unit: float = 2.0 ** max(math.floor(math.log2(epsilon) / degree), -14)
    return unit, epsilon / unit**degree


def _build_scaled_epsilon(mb: RewriteBuilder, epsilon: float, degree: int, most: Var) -> Var:
    """Divide `epsilon` by the power `degree` of `most` as ratios of about 1, so that no intermediate value underflows.

    A power of two is divided, so that the factor that is left is as exact in fp16 as epsilon was.
    """
    unit, rest = _factor_epsilon(epsilon, degree)
    power: Var = mb.real_div(x=np.float16(unit), y=most)
    if degree == 2:
        power = mb.square(x=power)
    high = np.float16(rest)
    low = np.float16(rest - float(high))
    made: Var = power if high == 1 else mb.mul(x=power, y=high)
    if abs(rest - float(high)) > _RELATIVE_TOLERANCE * rest:
        made = mb.add(x=made, y=mb.mul(x=power, y=low))
    return made


def build_llama_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.pow(x=x, y=half(2)), axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=Builder.add(x=mean, y=half(2.0**-20)), epsilon=half(2.0**-24)), name="y")


def build_divided_norm(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=Builder.mul(x=x, y=x), axes=[-1], keep_dims=True)
    mean = Builder.add(x=half(1e-5), y=Builder.real_div(x=total, y=half(8)))
    return Builder.real_div(x=x, y=Builder.add(x=Builder.sqrt(x=mean), y=half(1e-3)), name="y")


def build_reciprocal_norm(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum_square(x=x, axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.maximum(x=Builder.mul(x=total, y=half(0.125)), y=half(1e-4)))
    return Builder.mul(x=Builder.inverse(x=root, epsilon=half(1e-4)), y=x, name="y")


def build_plain_l2_norm(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.sqrt(x=total), name="y")


def build_prescaled_norm(x: Var, half: Any) -> Var:
    most = Builder.reduce_max(x=Builder.abs(x=x), axes=[-1], keep_dims=True)
    mean = Builder.reduce_mean(x=Builder.square(x=Builder.real_div(x=x, y=most)), axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.add(x=mean, y=half(1e-5)))
    return Builder.real_div(x=x, y=Builder.mul(x=root, y=most), name="y")


def build_tanh_norm(x: Var, half: Any) -> Var:
    return build_llama_norm(Builder.tanh(x=x), half)


def build_l2_norm(x: Var, half: Any) -> Var:
    return Builder.real_div(x=x, y=Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True), name="y")


def build_dropped_axes_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[0, 1], keep_dims=False)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=half(1e-5)), name="y")


def build_restored_axes_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=False)
    root = Builder.rsqrt(x=Builder.add(x=mean, y=half(1e-5)), epsilon=half(2.0**-24))
    return Builder.mul(x=x, y=Builder.expand_dims(x=root, axes=[-1]), name="y")


def build_computed_sum_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    total = Builder.add(x=mean, y=Builder.reduce_max(x=x, axes=[-1], keep_dims=True), name="total")
    return Builder.mul(x=x, y=Builder.rsqrt(x=total, epsilon=half(1e-5)), name="y")


def build_norm_program(
    body: Any = build_llama_norm, dtype: Any = np.float16, width: int = 8, opset: Any = ct.target.iOS17
) -> Program:
    kind = types.numpy_type_to_builtin_type(dtype)
    return build_program(lambda x: body(x, dtype), dtype=kind, opset=opset, x=(2, 3, width))


def build_shared_factor_norm() -> Program:
    def body(x: Var) -> list[Var]:
        less = Builder.sub(x=x, y=Builder.reduce_mean(x=x, axes=[-1], keep_dims=True))
        mean = Builder.reduce_mean(x=Builder.square(x=less), axes=[-1], keep_dims=True)
        factor = Builder.rsqrt(x=mean, epsilon=np.float16(1e-4))
        return [Builder.mul(x=less, y=factor, name="y"), Builder.mul(x=factor, y=x, name="z")]

    return build_program(body, x=(2, 3, 8))


def build_norm_op(kind: str, dtype: Any = np.float16, opset: int = 17, **parameters: Any) -> Program:
    """Build one normalization op with its own epsilon."""
    if kind == "layer_norm":
        parameters["axes"] = [-1]
    target = ct.target.iOS15 if opset == 15 else ct.target.iOS17
    return build_program(lambda x: getattr(Builder, kind)(x=x, name="y", **parameters), opset=target,
                         dtype=types.numpy_type_to_builtin_type(dtype), x=(2, 3, 4, 16))


def build_batch_norm(variance: float) -> Program:
    return build_norm_op("batch_norm", mean=np.zeros(3, np.float32), variance=np.full(3, variance, np.float32),
                         epsilon=np.float32(1e-12))


def build_rsqrt_epsilon_norm(x: Var, half: Any) -> Var:
    """Build a norm whose only epsilon is that of rsqrt."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12), name="root"), name="y")


def build_observed_norm(x: Var, half: Any) -> list[Var]:
    y = build_rsqrt_epsilon_norm(x, half)
    return [y, Builder.identity(x=y.op.y, name="z")]


def build_unrelated_product(x: Var, half: Any) -> Var:
    """Multiply another value by the root of the mean of squares of x."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=Builder.cos(x=x), y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12)), name="y")


def build_torch_normalize(x: Var, half: Any) -> Var:
    """Build a norm as torch's normalize."""
    norm = Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.maximum(x=norm, y=half(2.0**-24)), name="y")


def build_fraction(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.add(x=total, y=half(2.0**-24)), name="y")


def build_logarithm(x: Var, half: Any) -> Var:
    return Builder.log(x=Builder.square(x=x), epsilon=np.float32(1e-10), name="y")


def build_reciprocal_root(x: Var, half: Any) -> Var:
    return Builder.rsqrt(x=Builder.abs(x=x), epsilon=np.float32(1e-12), name="y")
