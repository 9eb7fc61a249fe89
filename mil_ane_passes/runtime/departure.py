"""Single ops changed as rewrites declare, to see by running what that does to the ops behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from coremltools.converters.mil.mil import Operation, Var, types

from ..core.pass_trace import Change
from .quirks.base import Quirk

if TYPE_CHECKING:
    import torch

__all__ = ["LEAST", "TRIALS", "Departure"]

LEAST = 2.0**-24
"The smallest number of fp16: constants from 0 to below it are read as it where a rewrite declares that."
TRIALS = 24
"""In how many ways results are moved. An angle that moves by more than a turn gives any sine: of so many draws one is
further than half of what differs, but for one element in 10^11."""
_ENDS, _SIGNED = 2, 4
"The trials in which all elements move alike, and those in which each moves as far as it may."
_POINTWISE = "elementwise_"
"How modules of kernels begin whose results depend on the operands' elements in the same place only."


class Departure(Quirk):
    """The ops of `changes` give what their rewrites declare: constants are raised, and results are moved.

    `trial` says how results move: None not at all, 0 all up as far as declared, 1 all down, 2 and 3 each element one
    way or the other, and from 4 on each up or down by any part of that: a remainder may be back at the end. Where an
    operand is beyond the rewrite's reach, or subnormal at full precision as only underflow leaves it, the result is NaN
    in trial 0, and else moves by as much as the largest one.
    Raised constants leave alone what an op gives element by element where an operand is exactly 0: such a result is the
    constant's, and a rewrite may raise it only if later ops do not show it.
    """

    name: ClassVar[str] = "declared changes"
    source: ClassVar[str] = ""
    op_types: ClassVar[tuple[str, ...]] = ()

    def __init__(self, changes: Mapping[Operation, Change], trial: int | None = None) -> None:
        self._changes, self._trial = changes, trial
        self._random: Any = None

    def affects(self, op: Any) -> bool:
        return op in self._changes

    def operands(self, op: Any, inputs: Any) -> Any:
        """`inputs` with constants raised."""
        import torch

        from .quirks._operands import ReplacedInputs

        raised = {}
        for name, var in op.inputs.items() if self._changes[op].raises else ():
            if _is_scalar_float(var) and 0 <= float(var.val) < LEAST:
                raised[name] = torch.full_like(inputs[name], LEAST)
        return ReplacedInputs(inputs, raised) if raised else inputs

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """`outputs`, with those of exact zeros as they were, and moved."""
        from .op_inputs import OpInputs

        change = self._changes[op]
        if change.raises:
            outputs = self._with_zeros(op, OpInputs(op, inputs.machine), outputs)
        if self._trial is None:
            return outputs
        operands = list(_computed(op, inputs))
        scale = max(map(_largest, outputs if change.moves_of == "result" else operands), default=0.0)
        pointwise = _is_pointwise(op, inputs)
        return [self._moved(y, change.moves * scale, operands, change.reach, pointwise) if y.is_floating_point() else y
                for y in outputs]

    def _moved(
        self, y: torch.Tensor, by: float, operands: Sequence[torch.Tensor], reach: float, pointwise: bool
    ) -> torch.Tensor:
        """`y` moved by at most `by`, or by anything where an operand is out of `reach` or too small to be exact."""
        import torch

        moved = y + by * self._drawn(y)
        for value in operands:
            size = value.abs()
            beyond = (size > reach) | ((size > 0) & (size < torch.finfo(value.dtype).tiny))
            if bool(beyond.any()):
                anything = y + _largest(y) * self._drawn(y) if self._trial else torch.full_like(y, torch.nan)
                moved = torch.where(beyond if pointwise else torch.ones_like(y, dtype=torch.bool), anything, moved)
        return moved

    def _with_zeros(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        import torch

        if not _is_pointwise(op, inputs):
            return outputs
        (y,), plain = outputs, inputs.machine.kernels[op.op_type](op, inputs)
        for value in _computed(op, inputs):
            y = torch.where(value == 0, plain, y)
        return (y,)

    def _drawn(self, y: torch.Tensor) -> torch.Tensor:
        """A number from -1 to 1 for each element."""
        import torch

        if self._trial is None or self._trial < _ENDS:
            return torch.full_like(y, -1.0 if self._trial else 1.0)
        if self._random is None:
            self._random = torch.Generator().manual_seed(self._trial)
        drawn = torch.rand(y.shape, generator=self._random, dtype=y.dtype) * 2 - 1
        return drawn.sign() if self._trial < _SIGNED else drawn


def _is_scalar_float(var: Any) -> bool:
    return isinstance(var, Var) and var.val is not None and types.is_float(var.dtype) and var.rank == 0


def _is_pointwise(op: Any, inputs: Any) -> bool:
    module: str = inputs.machine.kernels[op.op_type].__module__
    return module.rpartition(".")[2].startswith(_POINTWISE)


def _computed(op: Any, inputs: Any) -> Iterator[torch.Tensor]:
    """The float operands of `op` that are not constants."""
    for name, var in op.inputs.items():
        if isinstance(var, Var) and var.val is None and types.is_tensor(var.sym_type):
            value = inputs.get(name)
            if value.is_floating_point():
                yield value


def _largest(value: torch.Tensor) -> float:
    """The largest finite magnitude."""
    finite = value[value.isfinite()] if value.is_floating_point() else value[:0]
    return float(finite.abs().max()) if finite.numel() else 0.0
