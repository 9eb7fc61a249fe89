"""Weights cut along one axis."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ..core.build import RewriteBuilder
from ..core.layout import size_text
from ..core.query import consumers, itemsize

__all__ = ["kept_beside", "piece", "spans", "too_large"]


def spans(length: int, most: int) -> list[tuple[int, int]]:
    """`length` places as the fewest stretches of at most `most`, as even as they can be."""
    count = -(-length // most)
    ends = [length * number // count for number in range(count + 1)]
    return list(pairwise(ends))


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
