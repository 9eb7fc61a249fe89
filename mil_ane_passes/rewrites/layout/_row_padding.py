"""Padding of last axes: the rows that are padded, their new extent, and the cost by the 64-byte row rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_itemsize, is_const, is_symbolic
from ...passes.layout import compute_padded_bytes, format_bytes

__all__ = ["UNBOUNDED", "PaddedStep", "RowPadding"]

UNBOUNDED = float("inf")
"Reach of a padding that may contain infinities or NaN."


@dataclass(frozen=True)
class PaddedStep:
    """One op on padded rows.

    `takes` are the values it reads padded, `padded_outputs` those it computes padded, `unpadded_inputs` those it reads
    without padding although they are rows as well. `reach` is the largest magnitude in the padding it produces: 0 for
    zeros, `UNBOUNDED` where that is not known to be finite. `build` builds the op from its current inputs, as another
    region may have replaced a value named here. `constants` are the bytes of consts that it needs padded. With `exact`
    no sum is formed, so not even an order of roundings changes.
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
    """The extents that are padded: to a multiple of `multiple` elements or bytes (`unit`).

    Rows are padded where the gain in bytes is at least `min_gain`. `refused` has the first op that computes rows of an
    extent for which that fails.
    """

    multiple: int
    unit: Literal["elements", "bytes"]
    min_gain: float
    refused: dict[int, Operation] = field(default_factory=dict)
    "Keyed by extent; 0 is a symbolic one."

    def extent(self, var: Var) -> int | None:
        """Return the extent to which the last axis of `var` is padded; None where it is not padded."""
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
        """Compute the share of a row's bytes that padding `width` fp16 numbers to `wide` saves; negative for a loss."""
        return 1 - compute_padded_bytes((wide,), 2) / compute_padded_bytes((width,), 2)

    def note_unpadded(self, op: Operation) -> None:
        """Record `op` where the rows it computes are not padded because of their bytes or of a symbolic extent."""
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
        """Return why rows of `width` are not padded."""
        if not width:
            return "the last axis is symbolic: what is missing to a multiple is not known"
        wide = self.rounded(width, 2)
        before, after = (format_bytes(compute_padded_bytes((each,), 2)) for each in (width, wide))
        return (f"a row of {width} padded to {wide} takes {after} in place of {before}: gain "
                f"{self.compute_gain(width, wide):.3g}, below min_gain {self.min_gain:g}")

    def pad_const(self, mb: RewriteBuilder, const: Var, axes: Mapping[int, int], fill: float = 0) -> Var:
        """Pad const `const` with `fill` after each axis of `axes` (from the end) to its new extent, once for all
        users."""
        amounts = [(0, axes.get(at - const.rank, int(extent)) - int(extent)) for at, extent in enumerate(const.shape)]
        what = "_".join(f"{-axis}_to_{wide}" for axis, wide in axes.items())
        return mb.weight(const, f"{what}_{fill:g}" if fill else what,
                         lambda: np.pad(np.asarray(const.val), amounts, constant_values=fill))

    def count_padded_bytes(self, var: Var, axes: Mapping[int, int]) -> int:
        """Count the bytes of const `var` as `pad_const` makes it; 0 where it is not a const."""
        extents = [axes.get(at - var.rank, extent) for at, extent in enumerate(var.shape)]
        return prod(extents) * get_itemsize(var) if is_const(var) else 0
