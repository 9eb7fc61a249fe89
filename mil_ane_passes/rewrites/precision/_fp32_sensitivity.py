"""Ops that need fp32, found by their constants, by the values measured in runs, and by the error of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from coremltools.converters.mil.mil import Operation, Var

from ...ir.query import is_const
from ...ir.value_ranges import Range
from ._fp16_constants import FP16_MAX, FP16_MIN_SUBNORMAL, INFINITY_THRESHOLD, Fp16Constants
from ._fp16_conversion import is_fp32, iterate_fp16_operands

__all__ = ["PrecisionSearch", "describe_constant_loss", "describe_value_loss"]

_INFINITY_SAFE_OPS = frozenset({
    "add", "sub", "maximum", "minimum", "select", "softmax", "cast", "concat", "expand_dims", "fill", "gather",
    "gather_along_axis", "gather_nd", "identity", "pad", "reshape", "scaled_dot_product_attention", "slice_by_index",
    "slice_by_size", "split", "squeeze", "stack", "tile", "transpose",
})
"Ops in which a mask's large negative number may become minus infinity: none of them computes 0 * inf."
_UNDERFLOW_SAFE_OPS = frozenset({"add", "sub", "maximum", "minimum"})
_FP16_LIMIT_TEXT = f"fp16 ends at {FP16_MAX:.0f}"


def describe_constant_loss(op: Operation, halves: Fp16Constants) -> str | None:
    """Describe which constant of `op` fp16 cannot represent; None when it can represent all."""
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
    """Describe which value that `op` reads or computes fp16 cannot represent; None when it can represent all.

    With `sums`, partial sums beyond 32768 count as lost, too.
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
    """A search for the largest part of `ops` that can be in fp16 together with an output error of at most `most`.

    `error` measures the output error for some of the ops. A set that exceeds it is tried in halves, down to single ops.
    After `trials` runs the ops that have not been tried stay out.
    """

    def __init__(self, ops: Sequence[int], error: Callable[[Sequence[int]], float], most: float, trials: int) -> None:
        self._error, self._most, self._left = error, most, trials
        self.taken: list[int] = []
        self.error = 0.0
        "Output error with the ops `taken`."
        self.refused: dict[int, float] = {}
        "Output error with one op more, by op."
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
