"""Helpers of rules about kinds of ops: findings that are sure only for the generations that were measured."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from coremltools.converters.mil.mil import Operation, Var

from ..ir.query import is_compressed, is_const
from ..passes.contract import Hit, Rule
from ..passes.targets import ALL_TARGETS, Gate, Generation

__all__ = [
    "BEFORE_M4",
    "M1_TO_M5",
    "M4",
    "find_dynamic_inputs",
    "format_chips",
    "is_any_admitted",
    "make_unsupported_hit",
]

M4 = Gate(first="m4", last="m4")
BEFORE_M4 = Gate(last="m3")
M1_TO_M5 = Gate(first="m1", last="m5")
"Generations whose ANE compiler was queried without Core ML; on M4 it and Core ML agree on ops with this gate."


def make_unsupported_hit(
    rule: Rule, op: Operation, note: str, *, seen: Gate = ALL_TARGETS, message: str | None = None,
    covers: Sequence[Operation] = (), split_at: Sequence[Sequence[str]] = (),
) -> Hit:
    """Make a hit for `op`: unsupported on the ANE of the generations `seen`, and not measured on the others.

    `message` is Core ML's own, as it was measured on an M4; `split_at` as in `Hit`.
    """
    looked_at = tuple(rule.generations)
    if is_any_admitted(seen, looked_at):
        return Hit(op, note=note, message=message if is_any_admitted(M4, looked_at) else None, covers=covers,
                   split_at=split_at)
    return Hit(
        op,
        note=f"{note}: unsupported elsewhere, not measured on {format_chips(looked_at)}",
        sure=False,
        covers=covers,
        split_at=split_at,
    )


@functools.cache
def is_any_admitted(gate: Gate, generations: tuple[Generation, ...]) -> bool:
    """Return whether `gate` includes at least one of `generations`."""
    return any(gate.includes(generation) for generation in generations)


@functools.cache
def format_chips(generations: tuple[Generation, ...]) -> str:
    """Format the generations, each by its last chip."""
    return ", ".join(generation.chips[-1].upper() for generation in generations)


def find_dynamic_inputs(op: Operation, *names: str) -> list[str]:
    """Return those of the inputs `names` that are dynamic."""
    return [name for name in names if _is_dynamic(op.inputs.get(name))]


def _is_dynamic(var: Var | Sequence[Var] | None) -> bool:
    if isinstance(var, (list, tuple)):
        return any(_is_dynamic(each) for each in var)
    return var is not None and not is_const(var) and not is_compressed(var)
