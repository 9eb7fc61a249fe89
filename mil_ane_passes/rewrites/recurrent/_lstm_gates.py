"""Gates of an lstm and its cell, which may be kept more exactly than in fp16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ._recurrent_unrolling import apply_activation, split_equally

__all__ = ["add_with_compensation", "build_gates", "build_peephole_gates", "build_peephole_output_gate"]

_GATE_ACTIVATION = "recurrent_activation"


def build_gates(mb: RewriteBuilder, op: Operation, before: Var, lost: bool) -> Sequence[Var]:
    """Build the input, forget and output gate, which have one activation, and the new cell.

    With `lost` the forget gate f is returned as 1 - f = sigmoid(-x): fp16 has few numbers near 1, and many near 0.
    """
    size = int(before.shape[-1]) // 4
    ifo, z = mb.split(x=before, split_sizes=[3 * size, size], axis=-1)
    if lost:
        kind = types.nptype_from_builtin(before.dtype)
        signs = mb.weight(op.weight_hh, "signs", lambda: np.repeat([1, -1, 1], size).astype(kind))
        ifo = mb.mul(x=ifo, y=signs)
    return *split_equally(mb, apply_activation(mb, op, _GATE_ACTIVATION, ifo), 3, -1), apply_activation(
        mb, op, "cell_activation", z
    )


def build_peephole_gates(
    mb: RewriteBuilder, op: Operation, before: Var, lost: bool, cell: Var, peephole: Var,
) -> Sequence[Var]:
    """Build the same gates with peepholes to the cell.

    The output gate is returned before its peephole and activation, as its peephole reads the new cell.
    """
    i, f, o, z = split_equally(mb, before, 4, -1)
    i, f = (
        mb.add(x=gate, y=mb.mul(x=cell, y=_slice_peephole(mb, peephole, number))) for number, gate in enumerate((i, f))
    )
    if lost:
        f = mb.mul(x=f, y=types.nptype_from_builtin(f.dtype)(-1))
    return (
        apply_activation(mb, op, _GATE_ACTIVATION, i),
        apply_activation(mb, op, _GATE_ACTIVATION, f),
        o,
        apply_activation(mb, op, "cell_activation", z),
    )


def build_peephole_output_gate(mb: RewriteBuilder, op: Operation, before: Var, cell: Var, peephole: Var) -> Var:
    """Build the output gate with its peephole to the new cell."""
    return apply_activation(
        mb, op, _GATE_ACTIVATION, mb.add(x=before, y=mb.mul(x=cell, y=_slice_peephole(mb, peephole, 2)))
    )


def add_with_compensation(
    mb: RewriteBuilder, cell: Var, change: Var, old: Var | None = None, wanted: Var | None = None,
) -> tuple[Var, list[Var]]:
    """Add `change` to the cell; return the new cell and what the next step needs to compensate for the rounding.

    That is the old cell and the exact change. The rounded change is the difference of the two cells, exactly.
    """
    if old is not None:
        change = mb.add(x=change, y=mb.sub(x=wanted, y=mb.sub(x=cell, y=old)))
    return mb.add(x=cell, y=change), [cell, change]


def _slice_peephole(mb: RewriteBuilder, peephole: Var, number: int) -> Var:
    third: Var = mb.weight(peephole, f"gate_{number}", lambda: np.split(peephole.val, 3)[number])
    return third
