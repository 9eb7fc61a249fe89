"""Running sums as convs with ones: the windows grow by a factor with each conv, until they cover the entire axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import Any, TypeAlias

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.block_editor import get_first_op
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic

__all__ = [
    "ConvLayout",
    "CumsumLike",
    "CumsumSettings",
    "VirtualCumsum",
    "build_doubling_windows",
    "build_triangle_matmul",
    "build_window_convs",
    "choose_window_sizes",
    "is_bool_mask",
    "plan_conv_layout",
    "read_cumsum_settings",
    "slice_axis",
    "split_shape_at_axis",
]

_MAX_DEPTH = 5
"Most convs of one running sum, and most layout ops that are followed back to a cast."
_HEIGHT_AXIS, _WIDTH_AXIS = 2, 3
"Axes of the input of a conv."
_LAYOUT_OPS = ("expand_dims", "squeeze", "reshape", "transpose", "slice_by_index")


@dataclass(frozen=True)
class CumsumSettings:
    """The parameters of a cumsum, its axis counted from the front."""

    axis: int
    exclusive: bool
    reverse: bool


@dataclass(frozen=True)
class VirtualCumsum:
    """A running sum that is requested without an op."""

    x: Var
    asked: CumsumSettings


CumsumLike: TypeAlias = Operation | VirtualCumsum


@dataclass(frozen=True)
class ConvLayout:
    """The axes of x that become the batch, the channels, the height and the width of a conv's input, and their extents.

    An extent of -1 is symbolic.
    """

    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    @property
    def inserted_axes(self) -> list[int]:
        return [place for place, axes in enumerate(self.groups) if not axes]

    @property
    def merges_axes(self) -> bool:
        return any(len(axes) > 1 for axes in self.groups)


def is_bool_mask(x: Var) -> bool:
    """Return whether `x` is cast from bools, apart from layout ops: it then contains no infinity and no NaN."""
    for _ in range(_MAX_DEPTH):
        if x.op is None or x.op.op_type not in _LAYOUT_OPS:
            break
        x = x.op.x
    return x.op is not None and x.op.op_type == "cast" and bool(x.op.x.dtype == types.bool)


def read_cumsum_settings(op: CumsumLike) -> CumsumSettings:
    if isinstance(op, VirtualCumsum):
        return op.asked
    axis = int(get_const_value(op.axis)) % op.x.rank
    return CumsumSettings(axis, bool(get_const_value(op.exclusive)), bool(get_const_value(op.reverse)))


def choose_window_sizes(
    count: int, inner: int, widest: int, limit: int, spare: int
) -> tuple[tuple[int, ...], int] | None:
    """Choose how many elements each conv adds, and the extent to which the axis is padded; None where no choice fits.

    The n-th conv runs over every d-th element, d being the product of the window sizes before. The axis is laid out in
    rows of d, and `inner` elements a step must not make them wider than `limit`. `spare` elements of padding are needed
    in any case.
    """
    if max(count + spare, inner) > limit:
        return None
    if count <= widest:
        return (count,), count + spare
    for depth in range(1, _MAX_DEPTH):
        found = []
        for before in combinations_with_replacement(range(widest, 1, -1), depth):
            step = math.prod(before)
            last = -(-count // step)
            if last <= widest and step * inner <= limit:
                found.append((-(-(count + spare) // step) * step, -step, (*before, last)))
        if found:
            extent, _, chosen = min(found)
            return chosen, extent
    return None


def plan_conv_layout(
    extents: Sequence[Any], size: int, axis: int, widest: int, max_bytes: int, most: Sequence[int], *, reshaped: bool
) -> ConvLayout | str:
    """Plan the layout of x for the first conv, or return why none is possible.

    x has these extents and `size` bytes an element. With `reshaped`, more convs follow. `most` are the largest extents
    of batch or channels, and of height or width.
    """
    lead, tail = tuple(range(axis)), tuple(range(axis + 1, len(extents)))
    channels = lead[-1:]
    if channels and (is_symbolic(extents[axis - 1]) or extents[axis - 1] * widest * size > max_bytes):
        channels = ()
    batch = lead[:len(lead) - len(channels)]
    groups: tuple[tuple[int, ...], ...] = (batch, channels, (axis,), tail) if tail else (batch, channels, (), (axis,))
    if len(batch) > 1 and not channels and not tail and not reshaped:
        groups = (batch[:-1], (), batch[-1:], (axis,))
    found = ConvLayout(groups, tuple(_multiply_extents(extents, axes) for axes in groups))
    largest = (most[0], most[0], most[1], most[1])
    if any(extent > bound for extent, bound in zip(found.shape, largest)):
        return f"laid out as {'x'.join(map(str, found.shape))}, above {'x'.join(map(str, largest))}"
    unknown = sum(map(is_symbolic, extents))
    if unknown > 1 and (found.merges_axes or reshaped):
        return f"{unknown} axes are of symbolic size: no reshape can say which is which"
    return found


def _multiply_extents(extents: Sequence[Any], axes: Sequence[int]) -> int:
    held = [extents[axis] for axis in axes]
    return -1 if any(map(is_symbolic, held)) else math.prod(map(int, held))


def _return_unchanged(y: Var) -> Var:
    return y


def build_window_convs(
    mb: RewriteBuilder, op: CumsumLike, laid: ConvLayout, taps: Sequence[int], extent: int,
    after_each: Callable[[Var], Var] = _return_unchanged,
) -> Var:
    """Build the running sums of `op`'s x, its axis padded with zeros to `extent`: one conv for each of `taps`.

    `after_each` is applied to the result of each conv.
    """
    asked = read_cumsum_settings(op)
    more = extent - int(op.x.shape[asked.axis])
    y = after_each(_build_first_window(mb, op, laid, taps[0], more))
    step = 1
    for before, tap in pairwise(taps):
        step *= before
        inner = laid.shape[_WIDTH_AXIS] if laid.groups[_HEIGHT_AXIS] else 1
        y = mb.reshape(x=y, shape=[*laid.shape[:2], extent // step, inner * step if inner > 0 else -1])
        y = after_each(_build_window_conv(mb, y, tap, _HEIGHT_AXIS, (0, tap - 1) if asked.reverse else (tap - 1, 0)))
    y = _restore_axes(mb, op, y, laid, extent, reshaped=len(taps) > 1)
    begin = int(asked.exclusive and asked.reverse)
    return slice_axis(mb, y, asked.axis, begin, begin - more) if more else y


def build_doubling_windows(
    mb: RewriteBuilder,
    op: CumsumLike,
    laid: ConvLayout,
    tap: int,
    longest: int,
    after_each: Callable[[Var], Var] = _return_unchanged,
) -> Var:
    """Build the running sums of `op`'s x along an axis of symbolic size, of length `longest` at most.

    After one conv of `tap` taps, windows are doubled by adding the one that ends where it begins. `after_each` is
    applied to the result of the conv and of each sum.
    """
    asked = read_cumsum_settings(op)
    more = int(asked.exclusive)
    place = _HEIGHT_AXIS if laid.groups[_HEIGHT_AXIS] == (asked.axis,) else _WIDTH_AXIS
    y = after_each(_build_first_window(mb, op, laid, tap, more))
    while tap < longest:
        pads = [0] * 8
        pads[2 * place + asked.reverse] = tap
        wide = mb.pad(x=y, pad=pads, mode="constant", constant_val=np.float16(0))
        y = after_each(
            mb.add(
                x=y, y=slice_axis(mb, wide, place, tap, 0) if asked.reverse else slice_axis(mb, wide, place, 0, -tap)
            )
        )
        tap *= 2
    y = _restore_axes(mb, op, y, laid, -1, reshaped=False)
    begin = int(asked.exclusive and asked.reverse)
    return slice_axis(mb, y, asked.axis, begin, begin - more) if more else y


def _build_first_window(mb: RewriteBuilder, op: CumsumLike, laid: ConvLayout, tap: int, more: int) -> Var:
    """Build windows of `tap` elements at every position, with `more` zeros beyond the ends.

    Those zeros are at the end, one of them at the front where the running sums exclude their own element.
    """
    asked = read_cumsum_settings(op)
    x = op.x
    if laid.merges_axes:
        x = mb.reshape(x=x, shape=list(laid.shape))
    elif laid.inserted_axes:
        x = mb.expand_dims(x=x, axes=laid.inserted_axes)
    front = int(asked.exclusive and not asked.reverse)
    pair = (0, tap - 1 + more) if asked.reverse else (tap - 1 + front, more - front)
    return _build_window_conv(
        mb, x, tap, _HEIGHT_AXIS if laid.groups[_HEIGHT_AXIS] == (asked.axis,) else _WIDTH_AXIS, pair
    )


def _restore_axes(mb: RewriteBuilder, op: CumsumLike, y: Var, laid: ConvLayout, extent: int, *, reshaped: bool) -> Var:
    """Restore the axes of x on `y`, the summed one of `extent`."""
    if reshaped or laid.merges_axes:
        axis = read_cumsum_settings(op).axis
        sizes = [extent if each == axis else -1 if is_symbolic(size) else int(size)
                 for each, size in enumerate(op.x.shape)]
        y = mb.reshape(x=y, shape=sizes)
    elif laid.inserted_axes:
        y = mb.squeeze(x=y, axes=laid.inserted_axes)
    return y


def _build_window_conv(mb: RewriteBuilder, x: Var, tap: int, place: int, pair: tuple[int, int]) -> Var:
    """Build sums of `tap` neighbours along the height or the width, for each channel alone, padded by `pair` zeros."""
    channels = 1 if is_symbolic(x.shape[1]) else int(x.shape[1])
    kernel = (tap, 1) if place == _HEIGHT_AXIS else (1, tap)
    pad = [*pair, 0, 0] if place == _HEIGHT_AXIS else [0, 0, *pair]
    weight = _build_shared_const(mb, x, ("ones", channels, *kernel), lambda: np.ones((channels, 1, *kernel)))
    result: Var = mb.conv(x=x, weight=weight, groups=channels, pad_type="custom", pad=pad)
    return result


def build_triangle_matmul(mb: RewriteBuilder, op: Operation) -> Var:
    """Compute the running sums of `op`'s x as one product with a triangle of ones."""
    asked, count = read_cumsum_settings(op), int(op.x.shape[read_cumsum_settings(op).axis])
    last = asked.axis == op.x.rank - 1
    upper = last != asked.reverse
    band = int(asked.exclusive)

    def make() -> Any:
        square = np.ones((count, count))
        return np.triu(square, band) if upper else np.tril(square, -band)

    ones = _build_shared_const(mb, op.x, ("triangle", count, upper, band), make)
    if op.x.rank == 1:
        return mb.squeeze(x=mb.matmul(x=mb.expand_dims(x=op.x, axes=[0]), y=ones), axes=[0])
    if last:
        return mb.matmul(x=op.x, y=ones)
    if asked.axis == op.x.rank - 2:
        return mb.matmul(x=ones, y=op.x)
    flat = mb.matmul(x=ones, y=mb.reshape(x=op.x, shape=list(split_shape_at_axis(op, asked.axis))))
    return mb.reshape(x=flat, shape=[-1 if is_symbolic(size) else int(size) for size in op.x.shape])


def split_shape_at_axis(op: Operation, axis: int) -> tuple[int, int, int]:
    """Return the extents before the axis, of it, and after it; -1 where they are symbolic."""
    shape, rank = op.x.shape, op.x.rank
    return (
        _multiply_extents(shape, range(axis)),
        _multiply_extents(shape, [axis]),
        _multiply_extents(shape, range(axis + 1, rank)),
    )


def _build_shared_const(mb: RewriteBuilder, like: Var, what: tuple[Any, ...], make: Any) -> Var:
    """Return a const in the dtype of `like`, shared by all cumsums of the block that need the same one."""
    dtype = types.nptype_from_builtin(like.dtype)

    def made() -> Any:
        with mb.at(get_first_op(mb.block), "_".join(map(str, what))):
            return mb.const(val=np.ascontiguousarray(make().astype(dtype)))

    found: Var = mb.once((what, dtype), made)
    return found


def slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int) -> Var:
    """Slice elements `begin` to `end` of one axis; an `end` of 0 is its end, a negative one counts from there."""
    starts, ends = [0] * x.rank, [0] * x.rank
    starts[axis], ends[axis] = begin, end
    whole = [each != axis or end == 0 for each in range(x.rank)]
    result: Var = mb.slice_by_index(x=x, begin=starts, end=ends, end_mask=whole)
    return result
