"""Which ops cannot do without fp32: by their constants, by the values seen in runs, and by what the outputs lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from coremltools.converters.mil.mil import Operation, Var

from ..core.query import is_const
from ..core.ranges import Range
from ._halves import INFINITE, LARGEST, SMALLEST, Halves
from ._narrow import is_fp32, operands

__all__ = ["Search", "lost_constant", "lost_value"]

_ADDED = frozenset({
    "add", "sub", "maximum", "minimum", "select", "softmax", "cast", "concat", "expand_dims", "fill", "gather",
    "gather_along_axis", "gather_nd", "identity", "pad", "reshape", "scaled_dot_product_attention", "slice_by_index",
    "slice_by_size", "split", "squeeze", "stack", "tile", "transpose",
})
"Ops in which a mask's number for minus infinity may as well be that: nothing in them makes 0 * inf of it."
_ROUNDED_UP = frozenset({"add", "sub", "maximum", "minimum"})
_FP16_ENDS = f"fp16 ends at {LARGEST:.0f}"


def lost_constant(op: Operation, halves: Halves) -> str | None:
    """What fp16 cannot hold of the constants that `op` reads, in words; None when it can."""
    for name, var in operands(op):
        if not is_const(var):
            continue
        extent = halves.extent(var)
        if extent.largest > LARGEST:
            return f"its {name} holds {extent.largest:.3g}, {_FP16_ENDS}"
        if extent.beyond and op.op_type not in _ADDED:
            return f"its {name} would be infinite in fp16, and 0 times it NaN"
        if extent.vanishes and name != "epsilon" and op.op_type not in _ROUNDED_UP:
            return f"its {name} ends at {extent.largest:.3g}, below what fp16 holds ({SMALLEST:.1e})"
    return None


def lost_value(op: Operation, seen: Mapping[Var, Range], sums: bool) -> str | None:
    """What fp16 cannot hold of the values that `op` reads and makes, in words; None when it can.

    With `sums` also partial sums beyond 32768 are lost.
    """
    for name, found in _ranges(op, seen):
        if LARGEST < found.largest < INFINITE:
            return f"{name} reaches {found.largest:.3g}, {_FP16_ENDS}"
        if found.largest >= INFINITE and op.op_type not in _ADDED:
            return f"{name} would be infinite in fp16 ({found.largest:.3g}), and 0 times it NaN"
        if name == "its result" and 0 < found.largest < SMALLEST:
            return f"{name} ends at {found.largest:.3g}, below what fp16 holds ({SMALLEST:.1e})"
        if sums and found.partial is not None and found.partial > 32768:
            return f"its partial sums may reach {found.partial:.3g}, beyond 32768"
    return None


def _ranges(op: Operation, seen: Mapping[Var, Range]) -> Iterator[tuple[str, Range]]:
    values = [*operands(op), *(("its result", var) for var in op.outputs if is_fp32(var))]
    yield from ((name, seen[var]) for name, var in values if var in seen and not is_const(var))


class Search:
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
        self.untried: list[int] = []
        self._give(list(ops))

    def _give(self, ops: list[int]) -> None:
        if not ops:
            return
        if not self._left:
            self.untried += ops
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
            self._give(ops[:half])
            self._give(ops[half:])
