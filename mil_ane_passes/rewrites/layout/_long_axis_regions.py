"""Elementwise regions on values with a long axis, and shapes of as many elements with short axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isqrt, prod

from coremltools.converters.mil.mil import Block, Operation, Var

from ...ane.limits import find_limit
from ...ir.op_groups import list_groups, merge_groups
from ...ir.query import get_static_shape, is_opaque, is_used
from ...passes.layout import compute_padded_bytes
from ...passes.targets import Generation
from .._target_gate import find_limiting_generations
from ._broadcasts import BROADCASTING_OPS
from ._rank_lowering import UNARY_OPS

__all__ = ["find_balanced_shape", "get_elementwise_operands", "is_shape_unsupported", "iterate_long_axis_regions"]

ELEMENTWISE_OPS = frozenset({*UNARY_OPS, *BROADCASTING_OPS, "select"})


def get_elementwise_operands(op: Operation) -> list[Var]:
    """Return the operands that the op combines element by element."""
    return [op.inputs[name] for name in ("cond", "a", "b", "x", "y") if name in op.inputs]


def is_shape_unsupported(shape: tuple[int, ...], generation: Generation) -> bool:
    """Return whether a limit of `generation` excludes a value of `shape` from the ANE."""
    return bool(shape) and bool(find_limiting_generations("spatial", shape[-1], [generation])
                                or find_limiting_generations("channels", max(shape), [generation]))


def iterate_long_axis_regions(
    block: Block, generations: Iterable[Generation]
) -> Iterator[tuple[list[Operation], tuple[int, ...]]]:
    """Yield groups of elementwise ops on values of one unsupported shape, connected by their values."""
    groups: dict[Operation, list[Operation]] = {}
    judged: dict[tuple[int, ...], bool] = {}
    wanted = list(generations)
    for op in block.operations:
        if op.op_type not in ELEMENTWISE_OPS or is_opaque(op) or not is_used(op.outputs[0]):
            continue
        shape = get_static_shape(op.outputs[0])
        if shape is None or not judged.setdefault(shape, any(is_shape_unsupported(shape, each) for each in wanted)):
            continue
        given = get_elementwise_operands(op)
        if any(
            get_static_shape(var) is None or (get_static_shape(var) != shape and prod(var.shape) != 1) for var in given
        ):
            continue
        groups[op] = [op]
        for var in given:
            if var.op in groups and get_static_shape(var) == shape:
                merge_groups(groups, var.op, op)
    for members in list_groups(groups):
        yield members, get_static_shape(members[0].outputs[0]) or ()


def find_balanced_shape(size: int, generations: Iterable[Generation]) -> tuple[int, ...] | None:
    """Return a shape [1, 1, a, b] of `size` elements that those generations support, with the least row padding.

    Rows are padded to 64 bytes. Return None where no such shape is supported.
    """
    most = min((bound.most for each in generations if (bound := find_limit("spatial", [each]))), default=0)
    # A side shorter than this leaves the other too long; without the bound the search takes hours on a hostile shape.
    shortest = -(-size // most) if most else size + 1
    low = [number for number in range(max(1, shortest), min(isqrt(size), most) + 1) if size % number == 0]
    fits = [(1, 1, size // width, width) for each in low for width in (each, size // each)
            if max(width, size // width) <= most]
    return min(fits, key=lambda shape: (compute_padded_bytes(shape, 2), max(shape)), default=None)
