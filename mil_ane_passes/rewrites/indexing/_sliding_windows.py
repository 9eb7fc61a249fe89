"""Sliding windows along one axis by slices and reshapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic

__all__ = ["build_windows_from_rows", "can_reshape_to_windows", "read_window_settings", "slice_axis"]


def read_window_settings(op: Operation) -> tuple[int, int, int]:
    """Return the axis counted from the front, the elements of a window, and the distance between window starts."""
    return int(op.axis.val) % op.x.rank, int(op.size.val), get_const_value(op.stride, 1)


def can_reshape_to_windows(op: Operation) -> bool:
    """Return whether a reshape can express the shape of the windows."""
    return bool(sum(map(is_symbolic, op.x.shape)) <= 1)


def build_windows_from_rows(mb: RewriteBuilder, op: Operation, count: int) -> Var:
    """Build the windows from rows of a reshape, each joined with those after it."""
    axis, size, step = read_window_settings(op)
    x, extent, needed = op.x, int(op.x.shape[axis]), (count - 1 + -(-size // step)) * step
    if needed > extent:
        behind = [0] * (2 * x.rank)
        behind[2 * axis + 1] = needed - extent
        x = mb.pad(x=x, pad=behind, mode="constant", constant_val=np.float16(0))
    elif needed < extent:
        x = slice_axis(mb, x, axis, 0, needed, 1)
    shape = [-1 if is_symbolic(length) else int(length) for length in op.x.shape]
    shape[axis:axis + 1] = [needed // step, step]
    table = mb.reshape(x=x, shape=shape)
    parts = []
    for first in range(0, size, step):
        part = table if count * step == needed else slice_axis(mb, table, axis, first // step, first // step + count, 1)
        left = min(step, size - first)
        parts.append(part if left == step else slice_axis(mb, part, axis + 1, 0, left, 1))
    joined: Var = parts[0] if len(parts) == 1 else mb.concat(values=parts, axis=axis + 1)
    return joined


def slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int, step: int) -> Var:
    """Slice elements `begin` to `end` of one axis, every `step`-th; all of the other axes."""
    given: dict[str, Any] = {} if step == 1 else {"stride": _make_axis_values(x, axis, step, 1)}
    part: Var = mb.slice_by_index(
        x=x,
        begin=_make_axis_values(x, axis, begin, 0),
        end=_make_axis_values(x, axis, end, 0),
        end_mask=_make_axis_values(x, axis, False, True),
        **given,
    )
    return part


def _make_axis_values(x: Var, axis: int, here: Any, elsewhere: Any) -> list[Any]:
    return [here if number == axis else elsewhere for number in range(x.rank)]
