"""Slices of weights along one axis."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_consumers, get_itemsize
from ...passes.layout import format_bytes

__all__ = ["count_duplicated_bytes", "find_slicing_obstacle", "slice_weight", "split_evenly"]


def split_evenly(length: int, most: int) -> list[tuple[int, int]]:
    """Split `length` elements into the fewest ranges of at most `most`, as even as possible."""
    count = -(-length // most)
    ends = [length * number // count for number in range(count + 1)]
    return list(pairwise(ends))


def slice_weight(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Return elements `start` to `stop` of const `var` along `axis`, as one const for all users.

    On the first axis it is a view.
    """
    at = axis % var.rank

    def cut() -> np.ndarray[Any, Any]:
        whole: np.ndarray[Any, Any] = np.asarray(var.val)
        part: np.ndarray[Any, Any] = whole[(slice(None),) * at + (slice(start, stop),)]
        return part

    return mb.weight(var, f"{at}_{start}_{stop}", cut)


def count_duplicated_bytes(var: Var, op: Operation, alike: Callable[[Operation], bool]) -> int:
    """Count the bytes by which the weights grow when `op` reads slices of const `var`: 0 where all its readers will."""
    readers = get_consumers(var)
    if not var.consuming_blocks and all(other.enclosing_block is op.enclosing_block and other.op_type == op.op_type
                                        and alike(other) for other in readers):
        return 0
    return int(np.prod(var.shape)) * get_itemsize(var)


def find_slicing_obstacle(var: Var, op: Operation, alike: Callable[[Operation], bool], most: int) -> str:
    """Return why const `var` is not sliced for `op`, or ""."""
    size = count_duplicated_bytes(var, op, alike)
    if size <= most:
        return ""
    return (f"the weight '{var.name}' is read whole as well: its pieces would add {format_bytes(size)}, "
            f"above max_bytes={most}")
