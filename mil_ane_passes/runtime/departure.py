"""Departures: declared changes of single ops. A run with a departure shows the effect on the ops downstream of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..passes.pass_trace import Change
from .quirks.base import Quirk

if TYPE_CHECKING:
    import torch

__all__ = ["LAST_FULL_TRIAL", "LEAST", "TRIALS", "Departure"]

LEAST = 2.0**-24
"The smallest positive number of fp16. If a rewrite declares it, smaller constants from 0 on are read as this number."
TRIALS = 24
"""The number of trials, each of which moves results differently. An angle that moves by more than a full turn can have
any sine. With 24 draws, for all but one element in 10^11, at least one draw differs by more than half of the largest
possible difference.
"""
_ENDS, _SIGNED = 2, 4
"""The first trial with random moves (before it, all elements move in the same way), and the first trial in which an
element may move by less than the largest allowed amount.
"""
LAST_FULL_TRIAL = _SIGNED - 1
"The last of the first trials, in which each element moves by the largest allowed amount."
_FLOAT64_EPSILON = 2.0**-52
"The rounding error of float64 next to 1."
_POINTWISE = "elementwise_"
"Prefix of the kernel modules in which a result element depends only on the operands' elements at the same position."


class Departure(Quirk):
    """Changes the results of the ops in `changes` as their rewrites declare: raises constants and moves results.

    `trial` selects the direction and size of the moves. None: no move. 0: all elements up by the declared amount. 1:
    all elements down by it. 2 and 3: each element up or down by it. From 4 on: each element up or down by any part of
    it, because the effect of a full move may cancel downstream, for example in a remainder. If an operand is beyond the
    rewrite's reach, or subnormal at full precision (only underflow causes that), the result is NaN in trial 0. In the
    other trials it then moves by at most the largest magnitude in the result.

    A moved result is also rounded twice: once next to 1 and once when it is stored. A rounding next to 1, as in
    log(1 + exp(x)), may be larger than the result, and factors of the op increase it. With `stored`, results move by at
    least one unit in the last place of their dtype, plus the units that the rewrite declares, at the largest magnitude
    in the result. This is the difference that they would be allowed if they were outputs.

    For elements at which an operand is exactly 0, a raised constant does not change the result of an elementwise op.
    Such a result depends only on the constant, and a rewrite may raise the constant only if later ops do not expose it.
    """

    name: ClassVar[str] = "declared changes"
    source: ClassVar[str] = ""
    op_types: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, changes: Mapping[Operation, Change], trial: int | None = None, stored: bool = False
    ) -> None:
        self._changes, self._trial, self._stored = changes, trial, stored
        self._random: Any = None

    def affects(self, op: Any) -> bool:
        return op in self._changes

    def operands(self, op: Any, inputs: Any) -> Any:
        """Return `inputs`; if the rewrite declares it, scalar constants from 0 to below `LEAST` are raised to `LEAST`.
        """
        import torch

        from .quirks._operands import ReplacedInputs

        raised = {}
        for name, var in op.inputs.items() if self._changes[op].raises else ():
            if _is_scalar_float(var) and 0 <= float(var.val) < LEAST:
                raised[name] = torch.full_like(inputs[name], LEAST)
        return ReplacedInputs(inputs, raised) if raised else inputs

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return `outputs` moved as `trial` selects.

        Before that, results at operands of exactly 0 are recomputed from the unchanged constants.
        """
        from .op_inputs import OpInputs

        change = self._changes[op]
        if change.raises:
            outputs = self._with_zeros(op, OpInputs(op, inputs.machine), outputs)
        if self._trial is None:
            return outputs
        operands = list(_iterate_computed_operands(op, inputs))
        scale = max(map(_find_largest, outputs if change.moves_of == "result" else operands), default=0.0)
        least = _FLOAT64_EPSILON * max(1.0, *map(_find_largest, operands)) if change.moves else 0.0
        pointwise = _is_pointwise(op, inputs)

        def move_output(var: Var, y: torch.Tensor) -> torch.Tensor:
            unit = _compute_unit(var, _find_largest(y)) if self._stored and change.moves else 0.0
            by = max(change.moves * scale, least, (1 + change.ulps) * unit)
            return self._move_result(y, by, operands, change.reach, pointwise)

        return [move_output(var, y) if y.is_floating_point() else y for var, y in zip(op.outputs, outputs, strict=True)]

    def _move_result(
        self, y: torch.Tensor, by: float, operands: Sequence[torch.Tensor], reach: float, pointwise: bool
    ) -> torch.Tensor:
        """Move `y` by at most `by`.

        For elements at which an operand is beyond `reach` or too small to be exact, the result is NaN in trial 0, and
        moves by at most the largest magnitude in `y` in the other trials. If the op is not elementwise (`pointwise` is
        false), one such operand element is enough to change all elements of the result.
        """
        import torch

        moved = y + by * self._draw_moves(y)
        for value in operands:
            size = value.abs()
            beyond = (size > reach) | ((size > 0) & (size < torch.finfo(value.dtype).tiny))
            if bool(beyond.any()):
                anything = y + _find_largest(y) * self._draw_moves(y) if self._trial else torch.full_like(y, torch.nan)
                moved = torch.where(beyond if pointwise else torch.ones_like(y, dtype=torch.bool), anything, moved)
        return moved

    def _with_zeros(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        import torch

        if not _is_pointwise(op, inputs):
            return outputs
        (y,), plain = outputs, inputs.machine.kernels[op.op_type](op, inputs)
        for value in _iterate_computed_operands(op, inputs):
            y = torch.where(value == 0, plain, y)
        return (y,)

    def _draw_moves(self, y: torch.Tensor) -> torch.Tensor:
        """Return a number from -1 to 1 for each element of `y`: constant, a random sign or uniform, by the trial."""
        import torch

        if self._trial is None or self._trial < _ENDS:
            return torch.full_like(y, -1.0 if self._trial else 1.0)
        if self._random is None:
            self._random = torch.Generator().manual_seed(self._trial)
        drawn = torch.rand(y.shape, generator=self._random, dtype=y.dtype) * 2 - 1
        return drawn.sign() if self._trial < _SIGNED else drawn


def _compute_unit(var: Var, size: float) -> float:
    """Return one unit in the last place of the dtype of `var` at `size`, or at the dtype's largest number if `size`
    exceeds it."""
    dtype = types.nptype_from_builtin(var.dtype)
    below = float(np.nextafter(np.finfo(dtype).max, dtype(0)))
    return float(np.spacing(dtype(min(size, below))))


def _is_scalar_float(var: Any) -> bool:
    return isinstance(var, Var) and var.val is not None and types.is_float(var.dtype) and var.rank == 0


def _is_pointwise(op: Any, inputs: Any) -> bool:
    module: str = inputs.machine.kernels[op.op_type].__module__
    return module.rpartition(".")[2].startswith(_POINTWISE)


def _iterate_computed_operands(op: Any, inputs: Any) -> Iterator[torch.Tensor]:
    """Yield the float operands of `op` that are not constants."""
    for name, var in op.inputs.items():
        if isinstance(var, Var) and var.val is None and types.is_tensor(var.sym_type):
            value = inputs.get(name)
            if value.is_floating_point():
                yield value


def _find_largest(value: torch.Tensor) -> float:
    """Return the largest finite magnitude in `value`; 0 for integers, and if no element is finite."""
    finite = value[value.isfinite()] if value.is_floating_point() else value[:0]
    return float(finite.abs().max()) if finite.numel() else 0.0
