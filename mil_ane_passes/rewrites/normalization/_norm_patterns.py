"""Norms: match a value over the root of a mean or sum of squares in all its forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.bounds import get_measured_range
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_symbolic
from ...passes.contract import Example
from ...passes.examples import make_example

FP16_MAX = 65504.0
"The largest finite number of fp16."
_FP16_MIN_NORMAL = 2.0**-14
"The smallest normal number of fp16; the number that x is divided by never gets smaller."
_RELATIVE_TOLERANCE = 2.0**-19
"Relative error of a factor in fp16 from which the rest is added as a second term."
_MAX_COUNT = 16384
"""Maximum number of elements of a mean: if the largest is 1, the mean of the squares is at least 1 / count, a normal
fp16 number."""
_MAX_SQUARE_SUM = 32768.0
"Limit of the scaled sum of squares of numbers up to 1."
_INFINITY_THRESHOLD = 1e38
"Upper bound of a clip above which it has no effect."
_MAX_DEPTH = 10
"Maximum number of ops to follow between the squares and the division."
_MIN_EPSILON = 2.0**-42
"Smallest epsilon with a counterpart in fp16, for which its root as a power of two must be near to a normal number."
_DEFAULT_EPSILONS = {"rsqrt": 1e-12, "inverse": 1e-4}
"Epsilons of ops that have one and do not state it."
_REDUCTION_OPS = ("reduce_mean", "reduce_sum", "reduce_sum_square", "reduce_l2_norm")


@dataclass
class Norm:
    """A norm: `x` is squared, `reduce` is the op that sums; `steps` (kind, number) lead from the sum to the factor.

    The kinds are add, maximum, mul and div, with a number, and sqrt, rsqrt and inverse. `degree` is the power of x with
    which the factor grows: 1 where it is divided by, -1 where it is multiplied with. `obstacle` is why the norm cannot
    be rebuilt, or None.
    """

    x: Var
    reduce: Operation
    steps: list[tuple[str, float]] = field(default_factory=list)
    degree: int = 2
    obstacle: str | None = None

    @property
    def kept_shape(self) -> tuple[object, ...]:
        """The shape of the sum when it keeps its axes."""
        return tuple(1 if axis in self._get_axes else extent for axis, extent in enumerate(self.reduce.x.shape))

    @property
    def count(self) -> int | None:
        """The number of summed elements; None where it is symbolic."""
        extents = [self.reduce.x.shape[axis] for axis in self._get_axes]
        return None if any(map(is_symbolic, extents)) else math.prod(int(extent) for extent in extents)

    @property
    def _get_axes(self) -> list[int]:
        rank = self.reduce.x.rank
        return [axis % rank for axis in get_const_value(self.reduce.axes) or range(rank)]


def apply_power(kind: str, degree: int) -> int:
    """Return the degree after a step of `kind`; only roots and reciprocals change it."""
    return {"sqrt": degree // 2, "rsqrt": -degree // 2, "inverse": -degree}.get(kind, degree)


def iterate_norm_products(op: Operation) -> Iterator[tuple[Var, Var, Norm]]:
    """Yield the value, the factor and the norm of each reading of `op`, a mul or real_div, as a value over a norm."""
    divides = op.op_type == "real_div"
    for value, factor in [(op.x, op.y)] if divides else [(op.x, op.y), (op.y, op.x)]:
        norm = None if read_positive_scalar(value) is not None else match_norm(factor, 1 if divides else -1)
        if norm is not None:
            yield value, factor, norm


def match_norm(factor: Var, degree: int) -> Norm | None:
    """Match the norm that `factor` is the power `degree` (1 or -1) of; None where it is not a power of a norm."""
    path: list[Operation] = []
    obstacle: str | None = None
    var = factor
    for _ in range(_MAX_DEPTH):
        op = var.op
        if op is None:
            return None
        if op.op_type in _REDUCTION_OPS:
            return _parse_norm(op, path, obstacle, degree, factor)
        if op.op_type in ("expand_dims", "reshape"):  # only the final shape is checked
            var = op.x
            continue
        inner = _find_step_input(op)
        if inner is None and op.op_type in ("add", "maximum", "mul"):  # followed only for the reason of the miss
            inner = op.x
            obstacle = f"{op.op_type} gives '{op.outputs[0].name}', but not with a constant number above 0"
        if op.op_type == "cast":
            inner, obstacle = op.x, f"a cast gives '{op.outputs[0].name}': the norm is in two precisions"
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
        is_lower_bound = get_const_value(op.beta, 0.0) > _INFINITY_THRESHOLD
        return op.x if is_lower_bound and read_positive_scalar(op.alpha) is not None else None
    if op.op_type in ("add", "maximum", "mul", "real_div"):
        for operand, other in ((op.x, op.y), (op.y, op.x)):
            if read_positive_scalar(other) is not None:
                return operand
    return None


def _read_exponent(op: Operation) -> float | None:
    """Return the exponent of a `pow` where it is one constant number."""
    return float(np.asarray(op.y.val).reshape(-1)[0]) if is_const(op.y) and math.prod(op.y.shape) == 1 else None


def read_positive_scalar(var: Var | None) -> float | None:
    """Return the value of a constant of one element where it is positive and finite, else None."""
    if var is None or not is_const(var) or math.prod(var.shape) != 1:  # called for every factor: do not read weights
        return None
    number = float(np.asarray(var.val).reshape(-1)[0])
    return number if 0 < number < math.inf else None


def _parse_norm(
    reduce: Operation, path: list[Operation], obstacle: str | None, degree: int, factor: Var
) -> Norm | None:
    x = _find_squared_value(reduce)
    if x is None:
        return None
    norm = Norm(x, reduce, degree=1 if reduce.op_type == "reduce_l2_norm" else 2)
    if obstacle is None:
        if not all(_append_step(norm, op) for op in reversed(path)) or norm.degree != degree:
            return None
    elif not any(op.op_type in ("sqrt", "rsqrt", "pow") for op in path):
        return None
    norm.obstacle = _find_norm_obstacle(norm, obstacle, factor)
    return norm


def _find_squared_value(reduce: Operation) -> Var | None:
    """Return the value whose squares `reduce` sums, or None."""
    if reduce.op_type in ("reduce_sum_square", "reduce_l2_norm"):
        return reduce.x
    op = reduce.x.op
    if op is None or op.op_type not in ("square", "mul", "pow"):
        return None
    if (op.op_type == "mul" and op.x is not op.y) or (op.op_type == "pow" and _read_exponent(op) != 2):
        return None
    squared: Var = op.x
    return squared if squared.shape == op.outputs[0].shape else None  # a pow may add axes, as with an exponent [[[2]]]


def _append_step(norm: Norm, op: Operation) -> bool:
    """Append the step that `op` computes; return False where the result is not a power of a norm."""
    kind = op.op_type
    if kind == "pow":
        kind = "sqrt" if _read_exponent(op) == 0.5 else "rsqrt"
    if kind in ("sqrt", "rsqrt", "inverse"):
        if op.op_type in _DEFAULT_EPSILONS:
            _append_epsilon(norm, float(get_const_value(op.epsilon, _DEFAULT_EPSILONS[kind])))
        return _append_power(norm, kind)
    if kind == "clip":  # without an upper bound
        norm.steps.append(("maximum", float(get_const_value(op.alpha))))
        return norm.degree > 0
    number = read_positive_scalar(op.y)
    is_numerator = kind == "real_div" and number is None
    if number is None:
        number = read_positive_scalar(op.x)
    assert number is not None
    if kind == "add":
        _append_epsilon(norm, number)
    elif is_numerator:
        norm.steps += [("inverse", 0.0), ("mul", number)] if number != 1 else [("inverse", 0.0)]
        norm.degree = -norm.degree
    else:
        norm.steps.append(("div" if kind == "real_div" else kind, number))
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
    norm.degree = apply_power(kind, norm.degree)
    return True


def _find_norm_obstacle(norm: Norm, obstacle: str | None, factor: Var) -> str | None:
    if _is_scaled(norm.x):
        return "x is divided by its largest magnitude already"
    if norm.reduce.op_type == "reduce_l2_norm":
        return "reduce_l2_norm squares inside, which is reported to stay stable"
    if obstacle is not None:
        return obstacle
    if tuple(factor.shape) != norm.kept_shape:
        return "the root is reshaped to a shape other than that of a sum with kept axes"
    count = norm.count
    if count is None:
        return "the sum is over a symbolic dimension"
    if count > _MAX_COUNT:
        return (
            f"the sum is over {count} numbers, above {_MAX_COUNT}: of numbers up to 1 its terms are too small for fp16"
        )
    largest = 1.0 if norm.reduce.op_type == "reduce_mean" else float(count)
    for kind, number in norm.steps:
        if kind == "mul":
            largest *= number
        elif kind == "div":
            largest /= number
        elif kind in ("add", "maximum") and number < _MIN_EPSILON:
            return f"an epsilon of {number:.3g} has no counterpart in fp16"
        if largest > _MAX_SQUARE_SUM:
            return f"multiplied by {number:.6g} the sum of squares of numbers up to 1 may pass {_MAX_SQUARE_SUM:.0f}"
    return None


def _is_scaled(x: Var) -> bool:
    """Return whether `x` was divided by a value computed from a maximum."""
    if x.op is None or x.op.op_type != "real_div":
        return False
    divisor = x.op.y
    for _ in range(_MAX_DEPTH):
        if divisor.op is None or divisor.op.op_type not in ("clip", "maximum", "add"):
            break
        divisor = divisor.op.x
    return divisor.op is not None and divisor.op.op_type == "reduce_max"


def find_measured_total(measured: Any, norm: Norm, largest: float) -> float:
    """Return the largest measured sum of squares; a mean is computed from a sum, too."""
    count = norm.count or 0
    total = get_measured_range(measured, norm.reduce.outputs[0])
    if total is None or not total.finite:
        return largest**2 * count
    return max(largest**2, total.largest * (count if norm.reduce.op_type == "reduce_mean" else 1))


def find_lowest_divisor(norm: Norm) -> float:
    """Return the smallest number that x may be divided by: the smallest normal one, or the scale of an epsilon."""
    scales = [_factor_epsilon(epsilon, degree)[0] for epsilon, degree in _collect_epsilons(norm)]
    return max([_FP16_MIN_NORMAL, *scales])


def _collect_epsilons(norm: Norm) -> list[tuple[float, int]]:
    """Collect each epsilon and the power of x that it is added to."""
    epsilons, degree = [], 2
    for kind, number in norm.steps:
        if kind in ("add", "maximum"):
            epsilons.append((number, degree))
        degree = apply_power(kind, degree)
    return epsilons


def is_epsilon_representable(norm: Norm) -> bool:
    """Return whether fp16 holds each epsilon as it is."""
    return all(abs(float(np.float16(epsilon)) - epsilon) <= _RELATIVE_TOLERANCE * epsilon
               for epsilon, _ in _collect_epsilons(norm))


def _factor_epsilon(epsilon: float, degree: int) -> tuple[float, float]:
    """Return (s, c) with epsilon = c * s ** degree: s a power of two that is normal in fp16, c a number near 1."""
    scale: float = 2.0 ** max(math.floor(math.log2(epsilon) / degree), -14)
    return scale, epsilon / scale**degree


def build_factor(mb: RewriteBuilder, norm: Norm, value: Any, largest: Var | None = None) -> Any:
    """Build the factor from `value`, the sum or mean of the squares of x divided by `largest` (if any).

    Each epsilon is divided by the power of `largest` with which the sum of squares grows at that point.
    """
    def number_at(epsilon: float, degree: int) -> Any:
        return np.float16(epsilon) if largest is None else _build_scaled_epsilon(mb, epsilon, degree, largest)

    degree = 2
    for kind, number in norm.steps:
        if kind in ("add", "maximum"):
            value = getattr(mb, kind)(x=value, y=number_at(number, degree))
        elif kind in ("mul", "div"):
            value = (mb.mul if kind == "mul" else mb.real_div)(x=value, y=np.float16(number))
        elif kind == "sqrt":
            value = mb.sqrt(x=value)
        else:
            value = getattr(mb, kind)(x=value, epsilon=np.float16(0))
        degree = apply_power(kind, degree)
    return value


def _build_scaled_epsilon(mb: RewriteBuilder, epsilon: float, degree: int, largest: Var) -> Var:
    """Divide `epsilon` by the power `degree` of `largest` as ratios of about 1: no intermediate value underflows.

    A power of two is divided, so that the factor that is left is as exact in fp16 as epsilon was.
    """
    scale, rest = _factor_epsilon(epsilon, degree)
    power: Var = mb.real_div(x=np.float16(scale), y=largest)
    if degree == 2:
        power = mb.square(x=power)
    high = np.float16(rest)
    low = np.float16(rest - float(high))
    result: Var = power if high == 1 else mb.mul(x=power, y=high)
    if abs(rest - float(high)) > _RELATIVE_TOLERANCE * rest:
        result = mb.add(x=result, y=mb.mul(x=power, y=low))
    return result


def build_llama_norm(x: Var, number: Callable[[float], Any]) -> Any:
    """Build the norm of Llama; `number` converts numbers to the dtype of x."""
    mean = Builder.reduce_mean(x=Builder.pow(x=x, y=number(2)), axes=[-1], keep_dims=True)
    root = Builder.rsqrt(x=Builder.add(x=mean, y=number(2.0**-20)), epsilon=number(2.0**-24))
    return Builder.mul(x=x, y=root, name="y")


def make_norm_example(
    name: str, body: Callable[[Var, Any], Any] = build_llama_norm, dtype: Any = np.float16, width: int = 8,
    **settings: Any,
) -> Example:
    """Make an example of `body`, which gets x and a function that converts numbers to its dtype."""
    return make_example(name, lambda x: body(x, dtype), dtype=types.numpy_type_to_builtin_type(dtype),
                        x=(2, 3, width), **settings)
