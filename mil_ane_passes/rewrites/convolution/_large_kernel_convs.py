"""Convs with a large kernel as convs with small kernels; a `ConvPlan` describes the form.

frames: a stride cuts the input into rows of s elements; the K elements of a window are whole rows and the front of one.
Laid side by side they are channels c * K + k, the order of the weight as it is stored: a conv of kernel 1.
upright: a kernel 1xK as Kx1, with the last two axes of the input swapped.
fold: with K = q * p, output i * p + j is the sum over a and b of w[a * p + b] * x[(i + a) * p + (j + b)]: a conv of
kernel q x p over rows of p elements, each with the p - 1 that follow it.
parts: the kernel in pieces, each over the input from where its taps begin; their results are added.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, is_symbolic
from .._weights import reshape_weight

__all__ = [
    "SLOW_KERNEL_SIZES",
    "ConvPlan",
    "ConvSizes",
    "make_neutral_settings",
    "pad_or_crop",
    "plan_conv",
    "read_conv_sizes",
]

SLOW_KERNEL_SIZES = range(14, 17)
"Square kernels that are supported but compile for minutes: 13 compiles in seconds, 17 is unsupported."
_MAX_UPRIGHT_HEIGHT = 31
"The tallest kernel of width 1; no chip is known to support a taller one."
_MAX_HEIGHT, _MAX_WIDTH = 16, 13
"Limits of kernels that are both tall and wide: an M4 supported 16x16, and 13 is the largest width on an M1."

_ConvForm = Literal["frames", "upright", "fold", "parts"]


@dataclass(frozen=True)
class ConvSizes:
    """The sizes of a conv, one for each spatial axis; a symbolic size is 0."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[tuple[int, int]]
    extents: list[int]
    counts: list[int]
    "Numbers of outputs."


@dataclass(frozen=True)
class ConvPlan:
    """The form in which a conv is rewritten: `axes` (spatial) of frames, `pieces` (start, stop) of parts by axis.

    With `copies`, the weight is stored again with another layout in as many bytes, so that all its readers must be
    rewritten with that layout.
    """

    form: _ConvForm
    note: str
    axes: tuple[int, ...] = ()
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    rows: tuple[int, int] = (0, 0)
    copies: bool = False

    def build(self, mb: RewriteBuilder, op: Operation, sizes: ConvSizes) -> Var:
        if self.form == "frames":
            return _build_framed_conv(mb, op, sizes, self.axes)
        if self.form == "upright":
            return _build_upright_conv(mb, op, sizes)
        return (
            _build_folded_conv(mb, op, sizes, *self.rows)
            if self.form == "fold"
            else _build_summed_convs(mb, op, sizes, self.pieces)
        )


def read_conv_sizes(op: Operation, pads: list[tuple[int, int]]) -> ConvSizes:
    """Read the sizes of the conv."""
    spatial = range(2, op.x.rank)
    known = [[0 if is_symbolic(var.shape[axis]) else int(var.shape[axis]) for axis in spatial]
             for var in (op.x, op.outputs[0])]
    ones = [1] * len(spatial)
    return ConvSizes(
        [int(op.weight.shape[axis]) for axis in spatial],
        get_const_value(op.strides, ones),
        get_const_value(op.dilations, ones),
        pads,
        *known,
    )


def plan_conv(
    sizes: ConvSizes, large: list[int], symbolic: int, max_copies: int, max_parts: int,
) -> ConvPlan | str:
    """Plan the first form that fits a conv whose kernel is too large on the axes `large`, or return why none fits.

    `symbolic` is the number of symbolic dimensions of the input.
    """
    kernel = "x".join(map(str, sizes.kernel))
    plain = [axis for axis in range(len(sizes.kernel)) if sizes.dilations[axis] == 1 and sizes.extents[axis]]
    framed = tuple(axis for axis in plain if sizes.strides[axis] > 1)
    copies = math.prod(-(-sizes.kernel[axis] // sizes.strides[axis]) for axis in framed)
    if set(large) <= set(framed) and len(sizes.kernel) < 3 and symbolic < 2 and copies <= max_copies:
        kept = math.prod(size for axis, size in enumerate(sizes.kernel) if axis not in framed)
        inside = "x".join(str(sizes.kernel[axis]) for axis in framed)
        return ConvPlan("frames", f"windows of {inside} as channels", axes=framed, copies=kept > 1)
    if len(sizes.kernel) > 1 and sizes.kernel[-2] == 1 and sizes.kernel[-1] <= _MAX_UPRIGHT_HEIGHT:
        return ConvPlan("upright", f"kernel {kernel[:-len(str(sizes.kernel[-1])) - 2]}{sizes.kernel[-1]}x1")
    rows = _factor_kernel(sizes, set(plain)) if symbolic < 2 else None
    if rows:
        return ConvPlan("fold", f"kernel {rows[0]}x{rows[1]} over rows of {rows[1]}", rows=rows)
    pieces = tuple(
        _split_kernel(size, _find_max_piece(axis, sizes.kernel))
        if axis in large or axis >= len(sizes.kernel) - 2
        else ((0, size),)
        for axis, size in enumerate(sizes.kernel)
    )
    count = math.prod(map(len, pieces))
    if count > max_parts:
        return f"kernel {kernel} would take {count} parts, max_parts is {max_parts}"
    return ConvPlan("parts", f"{count} parts that are added", pieces=pieces, copies=True)


def _find_max_piece(axis: int, kernel: list[int]) -> int:
    """Return the largest piece on `axis`; it is larger where only the height has a kernel."""
    if axis == len(kernel) - 1:
        return _MAX_WIDTH
    return _MAX_UPRIGHT_HEIGHT if kernel[-1] == 1 else _MAX_HEIGHT


def _factor_kernel(sizes: ConvSizes, plain: set[int]) -> tuple[int, int] | None:
    """Factor the K of a 1-D conv of stride 1 into (q, p) within the limits, as square as possible, or return None."""
    if len(sizes.kernel) > 1 or sizes.strides != [1] or plain != {0}:
        return None
    found = [(sizes.kernel[0] // p, p) for p in range(2, _MAX_WIDTH + 1) if sizes.kernel[0] % p == 0]
    return min(
        (rows for rows in found if rows[0] <= _MAX_HEIGHT), key=lambda rows: abs(rows[0] - rows[1]), default=None
    )


def _split_kernel(size: int, most: int) -> tuple[tuple[int, int], ...]:
    """Split `size` into the fewest pieces of at most `most`, as (start, stop), of about the same size."""
    count = -(-size // most)
    edges = [number * size // count for number in range(count + 1)]
    return tuple(itertools.pairwise(edges))


def _build_framed_conv(mb: RewriteBuilder, op: Operation, sizes: ConvSizes, axes: tuple[int, ...]) -> Var:
    """Lay the windows out as channels on `axes`, then build a conv whose kernel is 1 there."""
    rows = {axis: sizes.counts[axis] + -(-sizes.kernel[axis] // sizes.strides[axis]) - 1 for axis in axes}
    fitted = pad_or_crop(mb, op.x, {axis: (sizes.pads[axis][0], rows[axis] * sizes.strides[axis]) for axis in axes})
    shape = [-1 if is_symbolic(extent) else int(extent) for extent in fitted.shape]
    dims: list[list[int]] = [[-1 if -1 in shape[:2] else shape[0] * shape[1]], *([extent] for extent in shape[2:])]
    x, shown = fitted, [*shape]
    for axis in axes:
        dims[1 + axis] = [rows[axis], sizes.strides[axis]]
        if sizes.kernel[axis] != sizes.strides[axis]:
            at = len(list(itertools.chain(*dims[:1 + axis])))
            x = _build_windows(mb, mb.reshape(x=x, shape=[*itertools.chain(*dims)]), at, sizes.counts[axis],
                               sizes.kernel[axis], sizes.strides[axis])
            dims[1 + axis] = [sizes.counts[axis], sizes.kernel[axis]]
            shown = [*itertools.chain(*dims)]
    flat = [*itertools.chain(*dims)]
    if flat != shown:
        x = mb.reshape(x=x, shape=flat)
    places = [len([*itertools.chain(*dims[:number])]) for number in range(len(dims))]
    inside = [places[1 + axis] + 1 for axis in axes]
    x = mb.transpose(x=x, perm=[0, *inside, *(at for at in range(1, len(flat)) if at not in inside)])
    taps = math.prod(sizes.kernel[axis] for axis in axes)
    x = mb.reshape(x=x, shape=[shape[0], shape[1] * taps, *(dim[0] for dim in dims[1:])])
    return rebuild_op(
        mb, op, x=x, weight=_build_frame_weight(mb, op, sizes, axes, taps), **make_neutral_settings(sizes, axes)
    )


def make_neutral_settings(sizes: ConvSizes, axes: tuple[int, ...], pads: bool = True) -> dict[str, Any]:
    """Return stride, dilation and padding, neutral on `axes`."""
    left = [(0, 0) if axis in axes else pair for axis, pair in enumerate(sizes.pads)]
    padded = {"pad_type": "custom", "pad": [amount for pair in left for amount in pair]}
    return {"strides": [1 if axis in axes else step for axis, step in enumerate(sizes.strides)],
            "dilations": [1 if axis in axes else step for axis, step in enumerate(sizes.dilations)],
            **(padded if pads and any(map(any, left)) else {"pad_type": "valid", "pad": None})}


def _build_frame_weight(mb: RewriteBuilder, op: Operation, sizes: ConvSizes, axes: tuple[int, ...], taps: int) -> Var:
    """Reshape the weight [O, I, ..., K, ...] to [O, I * K, ..., 1, ...].

    The bytes are the same where no other axis has a kernel.
    """
    kept = [1 if axis in axes else size for axis, size in enumerate(sizes.kernel)]
    shape = (int(op.weight.shape[0]), int(op.weight.shape[1]) * taps, *kept)
    if math.prod(kept) == 1:
        return reshape_weight(mb, op.weight, shape)
    order = [0, 1, *(2 + axis for axis in axes), *(2 + axis for axis in range(len(kept)) if axis not in axes)]
    return mb.weight(op.weight, f"frames_{'_'.join(map(str, axes))}",
                     lambda: np.asarray(op.weight.val).transpose(order).reshape(shape))


def _build_windows(mb: RewriteBuilder, x: Var, at: int, count: int, kernel: int, stride: int) -> Var:
    """Join each row of `stride`, at axis `at` (and the next), with the rows after it into windows of `kernel`."""
    parts = []
    for number in range(-(-kernel // stride)):
        ends = [0] * x.rank
        ends[at], ends[at + 1] = number + count, min(stride, kernel - number * stride)
        begins = [number if axis == at else 0 for axis in range(x.rank)]
        parts.append(mb.slice_by_index(x=x, begin=begins, end=ends, end_mask=[end == 0 for end in ends]))
    joined: Var = mb.concat(values=parts, axis=at + 1) if len(parts) > 1 else parts[0]
    return joined


def pad_or_crop(mb: RewriteBuilder, x: Var, wanted: dict[int, tuple[int, int]]) -> Var:
    """Pad `x` with zeros or crop it, so that each spatial axis has the wanted (before, length)."""
    before, more = [0] * x.rank, [0] * x.rank
    for axis, (zeros, length) in wanted.items():
        before[2 + axis], more[2 + axis] = zeros, length - zeros - int(x.shape[2 + axis])
    if min(more) < 0:
        ends = [min(extra, 0) for extra in more]
        x = mb.slice_by_index(x=x, begin=[0] * x.rank, end=ends, end_mask=[end == 0 for end in ends])
    return _pad_with_zeros(mb, x, before, [max(extra, 0) for extra in more])


def _pad_with_zeros(mb: RewriteBuilder, x: Var, before: list[int], behind: list[int]) -> Var:
    if not any(before) and not any(behind):
        return x
    flat = [amount for pair in zip(before, behind) for amount in pair]
    padded: Var = mb.pad(x=x, pad=flat, mode="constant", constant_val=types.nptype_from_builtin(x.dtype)(0))
    return padded


def _build_upright_conv(mb: RewriteBuilder, op: Operation, sizes: ConvSizes) -> Var:
    """Build the conv with its kernel on the height: the last two axes of input and result are swapped."""
    turn = [*range(op.x.rank - 2), op.x.rank - 1, op.x.rank - 2]
    changed: dict[str, Any] = {name: [*numbers[:-2], numbers[-1], numbers[-2]] for name, numbers in (
        ("strides", sizes.strides), ("dilations", sizes.dilations), ("pads", sizes.pads))}
    pads = [amount for pair in changed.pop("pads") for amount in pair]
    changed |= {"pad_type": "custom", "pad": pads} if any(pads) else {"pad_type": "valid", "pad": None}
    shape = tuple(op.weight.shape[axis] for axis in turn)
    made = rebuild_op(mb, op, x=mb.transpose(x=op.x, perm=turn), weight=reshape_weight(mb, op.weight, shape), **changed)
    back: Var = mb.transpose(x=made, perm=turn)
    return back


def _build_folded_conv(mb: RewriteBuilder, op: Operation, sizes: ConvSizes, q: int, p: int) -> Var:
    """Build a 1-D conv as a 2-D one over rows of p elements, each with the p - 1 that follow it."""
    (count,) = sizes.counts
    rows = -(-count // p)
    x = pad_or_crop(mb, op.x, {0: (sizes.pads[0][0], (rows + q) * p)})
    shape = [-1 if is_symbolic(extent) else int(extent) for extent in x.shape[:2]]
    apart = mb.reshape(x=x, shape=[*shape, rows + q, p])
    own = mb.slice_by_index(x=apart, begin=[0] * 4, end=[0, 0, rows + q - 1, 0], end_mask=[True, True, False, True])
    after = mb.slice_by_index(x=apart, begin=[0, 0, 1, 0], end=[0, 0, 0, p - 1], end_mask=[True, True, True, False])
    weight = reshape_weight(mb, op.weight, (*op.weight.shape[:2], q, p))
    made = rebuild_op(mb, op, x=mb.concat(values=[own, after], axis=3), weight=weight, strides=[1, 1], dilations=[1, 1],
                      pad_type="valid", pad=None)
    y: Var = mb.reshape(x=made, shape=[shape[0], int(op.weight.shape[0]), rows * p])
    if rows * p > count:
        y = mb.slice_by_index(x=y, begin=[0] * 3, end=[0, 0, count], end_mask=[True, True, False])
    return y


def _build_summed_convs(
    mb: RewriteBuilder, op: Operation, sizes: ConvSizes, pieces: tuple[tuple[tuple[int, int], ...], ...]
) -> Var:
    """Build one conv for each piece of the kernel, the first one with the bias, and add their results."""
    cut = tuple(axis for axis, parts in enumerate(pieces) if len(parts) > 1)
    before, behind = ([0, 0, *(pair[side] if axis in cut else 0 for axis, pair in enumerate(sizes.pads))]
                      for side in (0, 1))
    x = _pad_with_zeros(mb, op.x, before, behind)
    settings = {**make_neutral_settings(sizes, cut), "strides": sizes.strides, "dilations": sizes.dilations}
    total: Var | None = None
    for piece in itertools.product(*pieces):
        starts = [start * step for (start, _), step in zip(piece, sizes.dilations)]
        left = [(stop - size) * step for (_, stop), size, step in zip(piece, sizes.kernel, sizes.dilations)]
        ends = [0, 0, *left]
        part = x if not any(starts) and not any(left) else mb.slice_by_index(
            x=x, begin=[0, 0, *starts], end=ends, end_mask=[end == 0 for end in ends])
        made = rebuild_op(mb, op, x=part, weight=_slice_kernel(mb, op.weight, piece), **settings,
                          **({} if total is None else {"bias": None}))
        total = made if total is None else mb.add(x=total, y=made)
    assert total is not None
    return total


def _slice_kernel(mb: RewriteBuilder, weight: Var, piece: tuple[tuple[int, int], ...]) -> Var:
    where = (slice(None), slice(None), *(slice(start, stop) for start, stop in piece))
    name = "_".join(f"{start}to{stop}" for start, stop in piece)
    return mb.weight(weight, f"taps_{name}", lambda: np.asarray(weight.val)[where])
