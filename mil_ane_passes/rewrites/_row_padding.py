"""Which last axes are to be padded, to what, and what that costs by the 64-byte row rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..core.builder import RewriteBuilder
from ..core.layout import compute_padded_bytes, format_bytes
from ..core.query import get_itemsize, is_const, is_symbolic

__all__ = ["UNBOUNDED", "PaddedStep", "RowPadding"]

UNBOUNDED = float("inf")
"""The reach of a padding that may hold infinities or NaN."""


@dataclass(frozen=True)
class PaddedStep:
    """How one op does on padded rows.

    `takes` are the values it reads padded, `padded_outputs` those it makes padded, `unpadded_inputs` those it reads as
    they are although they are rows as well. `reach` is the largest magnitude of what it leaves in the padding: 0 for
    zeros, `UNBOUNDED` where that is not known to be finite. `build` makes the op, of what it reads by then: another
    region may have put a value in the place of one named here. `constants` are the bytes of consts it needs padded.
    `exact`: no sum is formed, so not even an order of roundings changes.
    """

    takes: tuple[Var, ...]
    padded_outputs: tuple[Var, ...]
    build: Callable[[RewriteBuilder, Callable[[Var], Var]], Any]
    reach: float = UNBOUNDED
    constants: int = 0
    exact: bool = True
    unpadded_inputs: tuple[Var, ...] = ()


@dataclass
class RowPadding:
    """The extents that are padded: to a multiple of `step` elements, where at least `min_gain` of a row's bytes is
    saved. `refused` has the first op that makes rows of an extent for which that does not hold."""

    multiple: int
    unit: Literal["elements", "bytes"]
    min_gain: float
    refused: dict[int, Operation] = field(default_factory=dict)
    "By extent; 0 stands for a symbolic one."

    def extent(self, var: Var) -> int | None:
        """What the last axis of `var` is padded to; None where it is left alone."""
        if not types.is_tensor(var.sym_type) or var.dtype != types.fp16 or not var.rank or is_symbolic(var.shape[-1]):
            return None
        width = int(var.shape[-1])
        wide = self.rounded(width, get_itemsize(var))
        return wide if width > 1 and wide > width and self.compute_gain(width, wide) >= self.min_gain else None

    def rounded(self, width: int, size: int) -> int:
        step = self.multiple if self.unit == "elements" else max(1, self.multiple // size)
        return -(-width // step) * step

    @staticmethod
    def compute_gain(width: int, wide: int) -> float:
        """The share of a row's bytes that padding `width` numbers of fp16 to `wide` saves; below 0 it takes more."""
        return 1 - compute_padded_bytes((wide,), 2) / compute_padded_bytes((width,), 2)

    def note_unpadded(self, op: Operation) -> None:
        """Remember `op` where the rows it makes would be padded but for their bytes, or but for a symbol."""
        for var in op.outputs:
            if not types.is_tensor(var.sym_type) or var.dtype != types.fp16 or not var.rank:
                continue
            if is_symbolic(var.shape[-1]):
                self.refused.setdefault(0, op)
            elif int(var.shape[-1]) > 1 and self.extent(var) is None:
                width = int(var.shape[-1])
                if self.rounded(width, get_itemsize(var)) > width:
                    self.refused.setdefault(width, op)

    def reason(self, width: int) -> str:
        """Why rows of `width` are left alone."""
        if not width:
            return "the last axis is symbolic: what is missing to a multiple is not known"
        wide = self.rounded(width, 2)
        before, after = (format_bytes(compute_padded_bytes((each,), 2)) for each in (width, wide))
        return (f"a row of {width} padded to {wide} takes {after} in place of {before}: gain "
                f"{self.compute_gain(width, wide):.3g}, below min_gain {self.min_gain:g}")

    def pad_const(self, mb: RewriteBuilder, const: Var, axes: Mapping[int, int], fill: float = 0) -> Var:
        """Const `const` with `fill` behind each axis of `axes` (from the end), up to its new extent; one for all."""
        amounts = [(0, axes.get(at - const.rank, int(extent)) - int(extent)) for at, extent in enumerate(const.shape)]
        what = "_".join(f"{-axis}_to_{wide}" for axis, wide in axes.items())
        return mb.weight(const, f"{what}_{fill:g}" if fill else what,
                         lambda: np.pad(np.asarray(const.val), amounts, constant_values=fill))

    def count_padded_bytes(self, var: Var, axes: Mapping[int, int]) -> int:
        """Bytes of const `var` as `pad_const` makes it; 0 for what is no const."""
        extents = [axes.get(at - var.rank, extent) for at, extent in enumerate(var.shape)]
        return prod(extents) * get_itemsize(var) if is_const(var) else 0
