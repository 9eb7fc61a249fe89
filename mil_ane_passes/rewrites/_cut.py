"""Weights cut along one axis, and which generations are helped by that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ..core.build import RewriteBuilder
from ..core.layout import size_text
from ..core.limits import over
from ..core.query import consumers, itemsize
from ..core.targets import Generation, listed

__all__ = ["kept_beside", "piece", "refusing", "spans", "taken_by", "too_large"]


def spans(length: int, most: int) -> list[tuple[int, int]]:
    """`length` places as the fewest stretches of at most `most`, as even as they can be."""
    count = -(-length // most)
    ends = [length * number // count for number in range(count + 1)]
    return list(pairwise(ends))


def refusing(name: str, extent: int, generations: Sequence[Generation]) -> list[Generation]:
    """The generations whose limit called `name` is below `extent`."""
    return [each for each in generations if over(name, extent, (each,))]


def taken_by(generations: Sequence[Generation], refused: Sequence[Generation]) -> str:
    """The reason not to act where some of `generations` take the op as it is."""
    taking = listed([each for each in generations if each not in refused])
    return f"taken on {taking}; name an older target, or always=true"


def piece(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Places `start` to `stop` of const `var` along `axis`, one const for all who ask; on the first axis a view."""
    at = axis % var.rank

    def cut() -> np.ndarray[Any, Any]:
        whole: np.ndarray[Any, Any] = np.asarray(var.val)
        part: np.ndarray[Any, Any] = whole[(slice(None),) * at + (slice(start, stop),)]
        return part

    return mb.weight(var, f"{at}_{start}_{stop}", cut)


def kept_beside(var: Var, op: Operation, alike: Callable[[Operation], bool]) -> int:
    """The bytes by which the weights grow when `op` reads pieces of const `var`: none where all readers will."""
    readers = consumers(var)
    if not var.consuming_blocks and all(other.enclosing_block is op.enclosing_block and other.op_type == op.op_type
                                        and alike(other) for other in readers):
        return 0
    return int(np.prod(var.shape)) * itemsize(var)


def too_large(var: Var, op: Operation, alike: Callable[[Operation], bool], most: int) -> str:
    """Why const `var` is not cut for `op`, or ""."""
    size = kept_beside(var, op, alike)
    if size <= most:
        return ""
    return (f"the weight '{var.name}' is read whole as well: its pieces would add {size_text(size)}, "
            f"above max_bytes={most}")
