"""Elementwise regions on values with a long axis, and shapes that hold as many elements in short ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isqrt, prod

from coremltools.converters.mil.mil import Block, Operation, Var

from ..core.groups import grouped, join
from ..core.layout import padded_bytes
from ..core.limits import limit
from ..core.query import is_opaque, static_shape, used
from ..core.targets import Generation
from ._broadcasts import BROADCASTING
from ._lowered import UNARY
from ._spared import refusing

__all__ = ["balanced", "operands", "refuses", "regions"]

KINDS = frozenset({*UNARY, *BROADCASTING, "select"})


def operands(op: Operation) -> list[Var]:
    """What is worked on element by element."""
    return [op.inputs[name] for name in ("cond", "a", "b", "x", "y") if name in op.inputs]


def refuses(shape: tuple[int, ...], generation: Generation) -> bool:
    """Whether the ANE of `generation` is stated not to hold a value of `shape`."""
    return bool(shape) and bool(refusing("spatial", shape[-1], [generation])
                                or refusing("channels", max(shape), [generation]))


def regions(block: Block, generations: Iterable[Generation]) -> Iterator[tuple[list[Operation], tuple[int, ...]]]:
    """Elementwise ops on values of one shape that some generation refuses, joined by the values they hand on."""
    groups: dict[Operation, list[Operation]] = {}
    judged: dict[tuple[int, ...], bool] = {}
    wanted = list(generations)
    for op in block.operations:
        if op.op_type not in KINDS or is_opaque(op) or not used(op.outputs[0]):
            continue
        shape = static_shape(op.outputs[0])
        if shape is None or not judged.setdefault(shape, any(refuses(shape, each) for each in wanted)):
            continue
        given = operands(op)
        if any(static_shape(var) is None or (static_shape(var) != shape and prod(var.shape) != 1) for var in given):
            continue
        groups[op] = [op]
        for var in given:
            if var.op in groups and static_shape(var) == shape:
                join(groups, var.op, op)
    for members in grouped(groups):
        yield members, static_shape(members[0].outputs[0]) or ()


def balanced(size: int, generations: Iterable[Generation]) -> tuple[int, ...] | None:
    """[1, 1, a, b] of `size` elements that those generations hold, with the least room lost to rows of 64 bytes."""
    most = min((bound.most for each in generations if (bound := limit("spatial", [each]))), default=0)
    # A side shorter than this leaves the other too long; without the bound the search takes hours on a hostile shape.
    shortest = -(-size // most) if most else size + 1
    low = [number for number in range(max(1, shortest), min(isqrt(size), most) + 1) if size % number == 0]
    fits = [(1, 1, size // width, width) for each in low for width in (each, size // each)
            if max(width, size // width) <= most]
    return min(fits, key=lambda shape: (padded_bytes(shape, 2), max(shape)), default=None)
