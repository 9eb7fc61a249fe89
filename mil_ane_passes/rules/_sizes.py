"""Helpers of rules about sizes: kernels as numbers, and generations by chip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from coremltools.converters.mil.mil import Operation
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..passes.targets import GENERATIONS, Generation, parse_target

__all__ = ["read_kernel_size", "select_generations", "to_static_extents"]


def to_static_extents(extents: Sequence[object]) -> tuple[int, ...] | None:
    """Return extents as numbers, or None where one is symbolic."""
    return None if any(is_symbolic(extent) for extent in extents) else tuple(int(str(extent)) for extent in extents)


def read_kernel_size(op: Operation) -> tuple[int, ...] | None:
    """Return the kernel of a conv, conv_transpose or pool; None where it is dynamic."""
    if op.op_type in ("conv", "conv_transpose"):
        return to_static_extents(op.weight.shape[2:])
    sizes = op.kernel_sizes.val
    return None if sizes is None else tuple(int(size) for size in sizes)


@cache
def _select_generations(generations: tuple[Generation, ...], chips: tuple[str, ...]) -> tuple[Generation, ...]:
    wanted = {parse_target(chip)[0] for chip in chips}
    return tuple(one for one in GENERATIONS if one in wanted and one in generations)


def select_generations(generations: Sequence[Generation], *chips: str) -> tuple[Generation, ...]:
    """Return the generations that one of `chips` belongs to."""
    return _select_generations(tuple(generations), chips)
