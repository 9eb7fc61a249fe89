"""Means of the windows on one axis, computed without a window that is too long.

windows: cut the axis into rows of the stride, lay them side by side on an axis of their own, and average over it.
parts: with K = n * k, take the mean of n means of k elements each; the input shifts by k from one to the next.
steps: compute a stride that is too long at stride 1, and keep every s-th result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic

__all__ = ["AxisPlan", "build_axis_means", "plan_axis"]


@dataclass(frozen=True)
class AxisPlan:
    """The computation on one axis of x: `part` is the window length of a part, `count` the number of windows."""

    at: int
    form: Literal["windows", "parts", "steps"]
    size: int
    stride: int
    pads: tuple[int, int]
    part: int = 0
    count: int = 0

    def __str__(self) -> str:
        if self.form == "parts":
            return f"{self.size // self.part} parts of {self.part} on axis {self.at}"
        return f"{self.form if self.form == 'windows' else 'every place'} on axis {self.at}"


def plan_axis(op: Operation, at: int, pads: tuple[int, int], most: int, fine: bool, max_copies: int) -> AxisPlan | str:
    """Plan how to compute the means on axis `at` of x, or return why they cannot be computed."""
    size, stride = get_const_value(op.kernel_sizes)[at - 2], get_const_value(op.strides, [1] * 3)[at - 2]
    reason = _find_averaging_obstacle(op, at, pads)
    if reason:
        return reason
    extent, copies = op.x.shape[at], -(-size // stride)
    one_open = sum(map(is_symbolic, op.x.shape)) < 2
    if op.x.rank < 5 and stride > 1 and copies <= max_copies and not is_symbolic(extent) and one_open:
        return AxisPlan(at, "windows", size, stride, pads, count=int(op.outputs[0].shape[at]))
    if size <= most:
        return AxisPlan(at, "steps", size, stride, pads)
    part = max((part for part in range(2, most + 1) if size % part == 0), default=0)
    if not part or size // part > max_copies:
        return f"window {size} is not {max_copies} or fewer equal parts of at most {most}"
    if not fine:
        return f"window {size} would be cut into parts of stride {stride}, which is unsupported as well"
    if op.x.rank == 5:
        return f"window {size} of a 3-D pool: its parts side by side would need rank 6"
    return AxisPlan(at, "parts", size, stride, pads, part=part)


def _find_averaging_obstacle(op: Operation, at: int, pads: tuple[int, int]) -> str | None:
    """Return why some mean on an axis is over fewer elements than the window has, or None."""
    if any(pads) and get_const_value(op.exclude_padding_from_average, False):
        return "padding is left out of the average, so what sums are divided by differs from place to place"
    given = get_const_value(op.pad, [0] * 6) if get_const_value(op.pad_type) == "custom" else [0] * 6
    if get_const_value(op.ceil_mode, False) and (is_symbolic(op.x.shape[at]) or pads[1] > given[2 * at - 3]):
        return "ceil_mode averages fewer elements in the last window"
    return None


def build_axis_means(mb: RewriteBuilder, x: Var, axis: AxisPlan) -> Var:
    """Compute the means of `x` on one axis."""
    flat = [0] * 2 * x.rank
    flat[2 * axis.at:2 * axis.at + 2] = axis.pads
    if any(axis.pads):
        zero = types.nptype_from_builtin(x.dtype)(0)
        x = mb.pad(x=x, pad=flat, mode="constant", constant_val=zero)
    if axis.form == "windows":
        return _average_windows(mb, x, axis)
    if axis.form == "steps":
        steps = [axis.stride if at == axis.at else 1 for at in range(x.rank)]
        every = _average_axis(mb, x, axis.at, axis.size, 1)
        kept: Var = mb.slice_by_index(x=every, begin=[0] * x.rank, end=[0] * x.rank, stride=steps,
                                      end_mask=[True] * x.rank)
        return kept
    means = [_average_axis(mb, _slice_axis(mb, x, axis.at, start, start + axis.part - axis.size), axis.at, axis.part,
                           axis.stride) for start in range(0, axis.size, axis.part)]
    mean: Var = mb.reduce_mean(x=mb.stack(values=means, axis=axis.at), axes=[axis.at], keep_dims=False)
    return mean


def _average_axis(mb: RewriteBuilder, x: Var, at: int, size: int, stride: int) -> Var:
    def only(number: int) -> list[int]:
        return [number if axis == at else 1 for axis in range(2, x.rank)]

    mean: Var = mb.avg_pool(x=x, kernel_sizes=only(size), strides=only(stride), pad_type="valid")
    return mean


def _slice_axis(mb: RewriteBuilder, x: Var, at: int, begin: int, end: int) -> Var:
    """Slice axis `at` of `x` from `begin` to `end`, which is at most 0 and counts from the end of the axis."""
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[at], ends[at] = begin, end
    part: Var = mb.slice_by_index(x=x, begin=begins, end=ends, end_mask=[each == 0 for each in ends])
    return part


def _average_windows(mb: RewriteBuilder, x: Var, axis: AxisPlan) -> Var:
    """Lay the rows of the stride that follow a row beside it, up to the length of a window, and average them."""
    at, rows = axis.at, axis.count + -(-axis.size // axis.stride) - 1
    missing = rows * axis.stride - int(x.shape[at])
    if missing < 0:
        x = _slice_axis(mb, x, at, 0, missing)
    if missing > 0:  # zeros after the last window, which reads none of them
        flat = [missing if place == 2 * at + 1 else 0 for place in range(2 * x.rank)]
        x = mb.pad(x=x, pad=flat, mode="constant", constant_val=types.nptype_from_builtin(x.dtype)(0))
    shape = [-1 if is_symbolic(extent) else int(extent) for extent in x.shape]
    x = mb.reshape(x=x, shape=[*shape[:at], rows, axis.stride, *shape[at + 1:]])
    parts: list[Any] = []
    for number in range(-(-axis.size // axis.stride)):
        begins, ends = [0] * x.rank, [0] * x.rank
        begins[at], ends[at] = number, number + axis.count
        ends[at + 1] = min(axis.stride, axis.size - number * axis.stride)
        whole = rows == axis.count and ends[at + 1] == axis.stride
        parts.append(x if whole else mb.slice_by_index(x=x, begin=begins, end=ends,
                                                       end_mask=[end == 0 for end in ends]))
    joined = mb.concat(values=parts, axis=at + 1) if len(parts) > 1 else parts[0]
    mean: Var = mb.reduce_mean(x=joined, axes=[at + 1], keep_dims=False)
    return mean
