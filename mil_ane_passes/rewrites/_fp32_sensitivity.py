"""Which ops cannot do without fp32: by their constants, by the values seen in runs, and by what the outputs lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from coremltools.converters.mil.mil import Operation, Var

from ..core.query import is_const
from ..core.value_ranges import Range
from ._fp16_constants import FP16_MAX, FP16_MIN_SUBNORMAL, INFINITY_THRESHOLD, Fp16Constants
from ._fp16_conversion import is_fp32, iterate_fp16_operands

__all__ = ["PrecisionSearch", "describe_constant_loss", "describe_value_loss"]

_INFINITY_SAFE_OPS = frozenset({
    "add", "sub", "maximum", "minimum", "select", "softmax", "cast", "concat", "expand_dims", "fill", "gather",
    "gather_along_axis", "gather_nd", "identity", "pad", "reshape", "scaled_dot_product_attention", "slice_by_index",
    "slice_by_size", "split", "squeeze", "stack", "tile", "transpose",
})
"Ops in which a mask's number for minus infinity may as well be that: nothing in them makes 0 * inf of it."
_UNDERFLOW_SAFE_OPS = frozenset({"add", "sub", "maximum", "minimum"})
_FP16_LIMIT_TEXT = f"fp16 ends at {FP16_MAX:.0f}"


def describe_constant_loss(op: Operation, halves: Fp16Constants) -> str | None:
    """What fp16 cannot hold of the constants that `op` reads, in words; None when it can."""
    for name, var in iterate_fp16_operands(op):
        if not is_const(var):
            continue
        extent = halves.extent(var)
        if extent.largest > FP16_MAX:
            return f"its {name} holds {extent.largest:.3g}, {_FP16_LIMIT_TEXT}"
        if extent.beyond and op.op_type not in _INFINITY_SAFE_OPS:
            return f"its {name} would be infinite in fp16, and 0 times it NaN"
        if extent.is_below_fp16 and name != "epsilon" and op.op_type not in _UNDERFLOW_SAFE_OPS:
            return f"its {name} ends at {extent.largest:.3g}, below what fp16 holds ({FP16_MIN_SUBNORMAL:.1e})"
    return None


def describe_value_loss(op: Operation, seen: Mapping[Var, Range], sums: bool) -> str | None:
    """What fp16 cannot hold of the values that `op` reads and makes, in words; None when it can.

    With `sum_windows` also partial sums beyond 32768 are lost.
    """
    for name, found in _iterate_value_ranges(op, seen):
        if FP16_MAX < found.largest < INFINITY_THRESHOLD:
            return f"{name} reaches {found.largest:.3g}, {_FP16_LIMIT_TEXT}"
        if found.largest >= INFINITY_THRESHOLD and op.op_type not in _INFINITY_SAFE_OPS:
            return f"{name} would be infinite in fp16 ({found.largest:.3g}), and 0 times it NaN"
        if name == "its result" and 0 < found.largest < FP16_MIN_SUBNORMAL:
            return f"{name} ends at {found.largest:.3g}, below what fp16 holds ({FP16_MIN_SUBNORMAL:.1e})"
        if sums and found.partial is not None and found.partial > 32768:
            return f"its partial sums may reach {found.partial:.3g}, beyond 32768"
    return None


def _iterate_value_ranges(op: Operation, seen: Mapping[Var, Range]) -> Iterator[tuple[str, Range]]:
    values = [*iterate_fp16_operands(op), *(("its result", var) for var in op.outputs if is_fp32(var))]
    yield from ((name, seen[var]) for name, var in values if var in seen and not is_const(var))


class PrecisionSearch:
    """The largest part of `ops` that can be in fp16 together with the outputs no further off than `most`.

    `error` says how far off they are for some of the ops. What is too much together is tried in halves, down to single
    ops; after `trials` runs what has not been tried stays out.
    """

    def __init__(self, ops: Sequence[int], error: Callable[[Sequence[int]], float], most: float, trials: int) -> None:
        self._error, self._most, self._left = error, most, trials
        self.taken: list[int] = []
        self.error = 0.0
        "How far off the outputs are with what is taken."
        self.refused: dict[int, float] = {}
        "How far off they would be with one op more."
        self.untried_ops: list[int] = []
        self._try_ops(list(ops))

    def _try_ops(self, ops: list[int]) -> None:
        if not ops:
            return
        if not self._left:
            self.untried_ops += ops
            return
        self._left -= 1
        wanted = sorted([*self.taken, *ops])
        error = self._error(wanted)
        if error <= self._most:
            self.taken, self.error = wanted, error
        elif len(ops) == 1:
            self.refused[ops[0]] = error
        else:
            half = len(ops) // 2
            self._try_ops(ops[:half])
            self._try_ops(ops[half:])
