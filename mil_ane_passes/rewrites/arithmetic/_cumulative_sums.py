"""Cumulative sums as convs with ones, whose windows grow with each conv until they cover the entire axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ane.limits import find_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_reshape_extents, is_symbolic
from ...passes.targets import Generation
from ..constants._generated_constants import build_shared_const

_MAX_CONVS = 5
"Most convs of one running sum; five of 13 ones cover more elements than any axis may have."
_HEIGHT_AXIS, _WIDTH_AXIS = 2, 3
"Axes of the input of a conv."


class CumsumSettings(NamedTuple):
    """The parameters of a cumsum, its axis counted from the front."""

    axis: int
    exclusive: bool = False
    reverse: bool = False


class ConvLimits(NamedTuple):
    """The widest kernel, the most channels and the largest spatial extent that are supported."""

    kernel: int
    channels: int
    extent: int


class ConvLayout(NamedTuple):
    """The axes of x that become the batch, the channels, the height and the width of a conv's input, and their extents.

    An extent of -1 is symbolic.
    """

    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    @property
    def inserted_axes(self) -> list[int]:
        return [position for position, axes in enumerate(self.groups) if not axes]

    @property
    def merges_axes(self) -> bool:
        return any(len(axes) > 1 for axes in self.groups)


@dataclass(frozen=True)
class WindowPlan:
    """The convs of a running sum: the layout of their input, and how many elements the window of each one covers.

    The axis is padded with zeros to `extent`. That is 0 for an axis of symbolic extent, where windows are doubled after
    one conv until they cover `longest` elements.
    """

    settings: CumsumSettings
    layout: ConvLayout
    sizes: tuple[int, ...]
    extent: int = 0
    longest: int = 0


def read_cumsum_settings(op: Operation) -> CumsumSettings:
    axis = int(get_const_value(op.axis)) % op.x.rank
    return CumsumSettings(axis, bool(get_const_value(op.exclusive)), bool(get_const_value(op.reverse)))


def find_conv_limits(generations: Sequence[Generation]) -> ConvLimits:
    """Return what all of `generations` support."""
    bounds = [find_limit(name, generations) for name in ("conv-kernel-width", "channels", "spatial")]
    return ConvLimits(*(bound.most for bound in bounds if bound is not None))


def plan_windows(
    extents: Sequence[Any], itemsize: int, settings: CumsumSettings, limits: ConvLimits, max_bytes: int, longest: int
) -> WindowPlan | str | None:
    """Plan the running sums of a value with these extents and `itemsize` bytes an element.

    Return None where no windows are small enough, and a reason where there is no layout for them.
    """
    count = extents[settings.axis]
    inner = max(multiply_extents(extents[settings.axis + 1:]), 1)
    sizes: tuple[int, ...]
    if is_symbolic(count):
        sizes, extent = (min(limits.kernel, longest),), 0
    else:
        chosen = _choose_window_sizes(int(count), inner, limits, int(settings.exclusive))
        if chosen is None:
            return None
        sizes, extent = chosen
    layout = _plan_layout(extents, itemsize, settings.axis, max(sizes), max_bytes, limits, reshaped=len(sizes) > 1)
    return layout if isinstance(layout, str) else WindowPlan(settings, layout, sizes, extent, longest)


def _choose_window_sizes(
    count: int, inner: int, limits: ConvLimits, spare: int
) -> tuple[tuple[int, ...], int] | None:
    """Choose how many elements each conv adds, and the extent to which the axis is padded; None where no choice fits.

    The n-th conv runs over every d-th element, d being the product of the window sizes before. The axis is laid out in
    rows of d, and `inner` elements a step must not make them wider than the limit. `spare` elements of padding are
    needed in any case.
    """
    if max(count + spare, inner) > limits.extent:
        return None
    if count <= limits.kernel:
        return (count,), count + spare
    for depth in range(1, _MAX_CONVS):
        candidates = []
        for sizes in combinations_with_replacement(range(limits.kernel, 1, -1), depth):
            step = math.prod(sizes)
            last = math.ceil(count / step)
            if last <= limits.kernel and step * inner <= limits.extent:
                extent = math.ceil((count + spare) / step) * step
                candidates.append((extent, -step, (*sizes, last)))
        if candidates:
            extent, _, chosen = min(candidates)  # the least padding, then the largest step
            return chosen, extent
    return None


def _plan_layout(
    extents: Sequence[Any], itemsize: int, axis: int, window: int, max_bytes: int, limits: ConvLimits, *, reshaped: bool
) -> ConvLayout | str:
    """Plan the layout of x for the first conv, or return why none is possible; with `reshaped`, more convs follow."""
    before, after = tuple(range(axis)), tuple(range(axis + 1, len(extents)))
    channels = before[-1:]
    if channels and (is_symbolic(extents[axis - 1]) or extents[axis - 1] * window * itemsize > max_bytes):
        channels = ()  # each channel has a window of ones of its own
    batch = before[:len(before) - len(channels)]
    if after:
        groups: tuple[tuple[int, ...], ...] = (batch, channels, (axis,), after)
    elif len(batch) > 1 and not channels and not reshaped:
        groups = (batch[:-1], (), batch[-1:], (axis,))  # merges one axis less
    else:
        groups = (batch, channels, (), (axis,))
    layout = ConvLayout(groups, tuple(multiply_extents([extents[each] for each in axes]) for axes in groups))
    largest = (limits.channels, limits.channels, limits.extent, limits.extent)
    if any(extent > bound for extent, bound in zip(layout.shape, largest)):
        return f"laid out as {'x'.join(map(str, layout.shape))}, above {'x'.join(map(str, largest))}"
    unknown = sum(map(is_symbolic, extents))
    if unknown > 1 and (layout.merges_axes or reshaped):
        return f"{unknown} axes are symbolic: a reshape cannot distinguish them"
    return layout


def multiply_extents(extents: Sequence[Any]) -> int:
    """Return the product of `extents`, -1 where one is symbolic."""
    return -1 if any(map(is_symbolic, extents)) else math.prod(map(int, extents))


def split_shape_at_axis(x: Var, axis: int) -> tuple[int, int, int]:
    """Return the number of elements before `axis`, along it and after it; -1 where an extent is symbolic."""
    return multiply_extents(x.shape[:axis]), multiply_extents(x.shape[axis:axis + 1]), \
        multiply_extents(x.shape[axis + 1:])


def _return_unchanged(y: Var) -> Var:
    return y


def build_running_sums(
    mb: RewriteBuilder, x: Var, plan: WindowPlan, after_each: Callable[[Var], Var] = _return_unchanged
) -> Var:
    """Build the running sums of `x` by `plan`; `after_each` is applied to the result of each conv and addition."""
    settings = plan.settings
    padding = plan.extent - int(x.shape[settings.axis]) if plan.extent else int(settings.exclusive)
    y = after_each(_build_first_window(mb, x, plan, padding))
    y = _build_further_convs(mb, y, plan, after_each) if plan.extent else _double_windows(mb, y, plan, after_each)
    y = _restore_axes(mb, x, y, plan)
    begin = int(settings.exclusive and settings.reverse)
    return slice_axis(mb, y, settings.axis, begin, begin - padding) if padding else y


def _build_first_window(mb: RewriteBuilder, x: Var, plan: WindowPlan, padding: int) -> Var:
    """Build the sums of the first window at every position, with `padding` zeros beyond the ends.

    Those zeros are at the end, one of them at the front where the running sums exclude their own element.
    """
    settings, layout, size = plan.settings, plan.layout, plan.sizes[0]
    if layout.merges_axes:
        x = mb.reshape(x=x, shape=list(layout.shape))
    elif layout.inserted_axes:
        x = mb.expand_dims(x=x, axes=layout.inserted_axes)
    front = int(settings.exclusive and not settings.reverse)
    pad = (0, size - 1 + padding) if settings.reverse else (size - 1 + front, padding - front)
    return _build_window_conv(mb, x, size, _find_conv_axis(plan), pad)


def _find_conv_axis(plan: WindowPlan) -> int:
    """Return the axis of the conv's input along which the sums run."""
    return _HEIGHT_AXIS if plan.layout.groups[_HEIGHT_AXIS] == (plan.settings.axis,) else _WIDTH_AXIS


def _build_further_convs(mb: RewriteBuilder, y: Var, plan: WindowPlan, after_each: Callable[[Var], Var]) -> Var:
    """Extend the windows of `y` by convs over every d-th element, which a reshape lays out along the height."""
    layout, step = plan.layout, 1
    for previous, size in pairwise(plan.sizes):
        step *= previous
        inner = layout.shape[_WIDTH_AXIS] if layout.groups[_HEIGHT_AXIS] else 1
        width = inner * step if inner > 0 else -1
        y = mb.reshape(x=y, shape=[*layout.shape[:2], plan.extent // step, width])
        pad = (0, size - 1) if plan.settings.reverse else (size - 1, 0)
        y = after_each(_build_window_conv(mb, y, size, _HEIGHT_AXIS, pad))
    return y


def _double_windows(mb: RewriteBuilder, y: Var, plan: WindowPlan, after_each: Callable[[Var], Var]) -> Var:
    """Double the windows of `y` by adding the one that ends where each begins, until they cover the longest axis."""
    axis, size, reverse = _find_conv_axis(plan), plan.sizes[0], plan.settings.reverse
    while size < plan.longest:
        pads = [0] * 8
        pads[2 * axis + reverse] = size
        padded = mb.pad(x=y, pad=pads, mode="constant", constant_val=np.float16(0))
        moved = slice_axis(mb, padded, axis, size, 0) if reverse else slice_axis(mb, padded, axis, 0, -size)
        y = after_each(mb.add(x=y, y=moved))
        size *= 2
    return y


def _restore_axes(mb: RewriteBuilder, x: Var, y: Var, plan: WindowPlan) -> Var:
    """Restore the axes of `x` on `y`, the summed one with its padding."""
    if plan.layout.merges_axes or len(plan.sizes) > 1:
        sizes = get_reshape_extents(x.shape)
        sizes[plan.settings.axis] = plan.extent or -1
        return mb.reshape(x=y, shape=sizes)
    return mb.squeeze(x=y, axes=plan.layout.inserted_axes) if plan.layout.inserted_axes else y


def _build_window_conv(mb: RewriteBuilder, x: Var, size: int, axis: int, pad: tuple[int, int]) -> Var:
    """Build sums of `size` neighbours along the height or the width, for each channel alone, padded with zeros."""
    channels = 1 if is_symbolic(x.shape[1]) else int(x.shape[1])
    kernel = (size, 1) if axis == _HEIGHT_AXIS else (1, size)
    pads = [*pad, 0, 0] if axis == _HEIGHT_AXIS else [0, 0, *pad]
    weight = build_shared_const(
        mb, ("ones", channels, *kernel), lambda: np.ones((channels, 1, *kernel), np.float16))
    result: Var = mb.conv(x=x, weight=weight, groups=channels, pad_type="custom", pad=pads)
    return result


def slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int) -> Var:
    """Slice elements `begin` to `end` of one axis; an `end` of 0 is its end, a negative one counts from there."""
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[axis], ends[axis] = begin, end
    end_mask = [each != axis or end == 0 for each in range(x.rank)]
    result: Var = mb.slice_by_index(x=x, begin=begins, end=ends, end_mask=end_mask)
    return result
