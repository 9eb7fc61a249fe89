"""Running sums as convs with ones: windows that grow by a factor with each conv, until they hold the whole axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import Any, TypeAlias

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..core.block_editor import get_first_op
from ..core.builder import RewriteBuilder
from ..core.query import get_const_value, is_symbolic

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
_HEIGHT_AXIS, _WIDTH_AXIS = 2, 3
_LAYOUT_OPS = ("expand_dims", "squeeze", "reshape", "transpose", "slice_by_index")


@dataclass(frozen=True)
class CumsumSettings:
    """What a cumsum asks for, its axis counted from the front."""

    axis: int
    exclusive: bool
    reverse: bool


@dataclass(frozen=True)
class VirtualCumsum:
    """A running sum that is asked for without an op."""

    x: Var
    asked: CumsumSettings


CumsumLike: TypeAlias = Operation | VirtualCumsum


@dataclass(frozen=True)
class ConvLayout:
    """Which axes of x lie on the batch, the channels, the height and the width of a conv's input, and their extents.

    -1 is symbolic.
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
    """Whether `x` is cast from truth values, but for its layout: there is no infinity and no NaN in it."""
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
    """How many elements each conv adds up, and the extent that the axis is padded to; None where no choice fits.

    The n-th conv runs over every d-th element, d being the product of those before: the axis is laid out in rows of d,
    which `inner` elements a step must not make wider than `limit`. `spare` elements of padding are wanted anyway.
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
    """How x, of these extents and of elements of `size` bytes, is laid out for the first conv, or why it cannot be.

    `reshaped` says that more convs follow; `most` are the largest extents of batch or channels, and of height or width.
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
    """The running sums of `op`'s x, its axis padded with zeros to `extent`: one conv for each of `taps`.

    `after_each` is applied to what each conv makes.
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
    """The running sums of `op`'s x along an axis of symbolic size, `longest` at most.

    One conv of `tap` taps, then windows are doubled by adding the one that ends where it begins. `after_each` is
    applied to what the conv and each sum makes.
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
    """Windows of `tap` elements at every place, with `addend` zeros beyond the ends.

    Those zeros stand behind, one of them in front where the running sums exclude their own element.
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
    """`y` with the axes of x, the summed one of `extent`."""
    if reshaped or laid.merges_axes:
        axis = read_cumsum_settings(op).axis
        sizes = [extent if each == axis else -1 if is_symbolic(size) else int(size)
                 for each, size in enumerate(op.x.shape)]
        y = mb.reshape(x=y, shape=sizes)
    elif laid.inserted_axes:
        y = mb.squeeze(x=y, axes=laid.inserted_axes)
    return y


def _build_window_conv(mb: RewriteBuilder, x: Var, tap: int, place: int, pair: tuple[int, int]) -> Var:
    """Sums of `tap` neighbours along the height or the width, each channel by itself, `pair` zeros beside."""
    channels = 1 if is_symbolic(x.shape[1]) else int(x.shape[1])
    kernel = (tap, 1) if place == _HEIGHT_AXIS else (1, tap)
    pad = [*pair, 0, 0] if place == _HEIGHT_AXIS else [0, 0, *pair]
    weight = _build_shared_const(mb, x, ("ones", channels, *kernel), lambda: np.ones((channels, 1, *kernel)))
    result: Var = mb.conv(x=x, weight=weight, groups=channels, pad_type="custom", pad=pad)
    return result


def build_triangle_matmul(mb: RewriteBuilder, op: Operation) -> Var:
    """The running sums of `op`'s x as one product with a triangle of ones."""
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
    """The extents before the axis, of it, and behind it; -1 where they are symbolic."""
    shape, rank = op.x.shape, op.x.rank
    return (
        _multiply_extents(shape, range(axis)),
        _multiply_extents(shape, [axis]),
        _multiply_extents(shape, range(axis + 1, rank)),
    )


def _build_shared_const(mb: RewriteBuilder, like: Var, what: tuple[Any, ...], make: Any) -> Var:
    """A const in the dtype of `like`, one for all cumsums of the block that want the same."""
    dtype = types.nptype_from_builtin(like.dtype)

    def made() -> Any:
        with mb.at(get_first_op(mb.block), "_".join(map(str, what))):
            return mb.const(val=np.ascontiguousarray(make().astype(dtype)))

    found: Var = mb.once((what, dtype), made)
    return found


def slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int) -> Var:
    """Elements `begin` to `end` of one axis; an `end` of 0 is its end, a negative one is counted from there."""
    starts, ends = [0] * x.rank, [0] * x.rank
    starts[axis], ends[axis] = begin, end
    whole = [each != axis or end == 0 for each in range(x.rank)]
    result: Var = mb.slice_by_index(x=x, begin=starts, end=ends, end_mask=whole)
    return result
