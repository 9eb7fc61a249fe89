"""Run a conv with a large kernel as convs with small ones; a `_ConvPlan` describes the form.

stages: with K = q * p and a stride s = t * p, a conv of kernel p and stride p copies each p x p elements to as many
channels, by a weight of ones and zeros; one of kernel q and stride t follows.
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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ane.limits import collect_evidence, find_exceeded_limit
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_reshape_extents, is_compressed, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite, Rule
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_weight
from ...passes.targets import parse_target
from ...rules.convolution import CompileTraps, ConvKernelSize
from .._weights import find_reshape_obstacle, has_uniform_readers, reshape_weight, split_evenly
from ._conv_geometry import (
    ConvSizes,
    crop_ends,
    divide_out_2_and_3,
    make_neutral_settings,
    pad_or_crop,
    pad_with_zeros,
    read_conv_sizes,
    resolve_conv_pads,
)
from ._examples import make_conv_example

_KERNEL_16_CHIPS = (*parse_target("m4"), *parse_target("m6"))
"Chips that support a square kernel of 16, though other kernels of width 16 are unsupported."
_SLOW_KERNEL_SIZES = range(14, 17)
"Square kernels that are supported but compile for minutes: 13 compiles in seconds, 17 is unsupported."
_MAX_UPRIGHT_HEIGHT = 31
"The tallest kernel of width 1; no chip is known to support a taller one."
_MAX_HEIGHT, _MAX_WIDTH = 16, 13
"Limits of kernels that are both tall and wide: an M4 supported 16x16, and 13 is the largest width on an M1."


class SplitWideConv(Rewrite):
    """Compute a conv whose kernel exceeds the limit as a conv of kernel 1 over windows, or as a sum of smaller convs.

    why     Kernels are limited to 15 wide and 31 tall on an M4, and 13 wide on an M1; on an M6 a larger kernel moves
            the entire model off the ANE. A 16x16 kernel takes minutes and 11.7 GB to compile for an M4.
    when    An fp16 conv with a stored weight whose kernel is too large, or 14 to 16 square. The first applicable form:
            `stages`, two convs in sequence, for patches of few channels whose kernel and stride have a common factor p
            (16 and 16: 4), if the resulting strides have no prime factors other than 2 and 3, and C * p * p is at most
            the number of output channels. `frames`, if the large axes are strided, undilated and of static size: each
            window becomes channels of a conv with kernel 1 (patches, spectra). `upright` for 1xK with K up to 31: the
            last two axes are swapped. `fold` for a 1-D conv of stride 1 and static size with K = q * p: a 2-D conv with
            a q x p kernel over rows of p. `parts` for all others: pieces of the kernel on shifted inputs, whose results
            are added. 1-D kernels below 32 are left to ane::lift_conv_1d.
    exact   rounding: the same products; parts round each result and each sum once more, and a partial sum must stay
            below 65504. No weight is stored twice. A compressed weight stays compressed; stages and parts do not
            support it, and frames only if they cover all kernel axes longer than 1. Stages multiply by zeros, so that
            an infinite or NaN element affects the outputs of all windows that contain its p x p patch; the other forms
            multiply the same elements as before.
    cost    stages take a conv that reads a few kB of weights: patches of 16 on 64 x 64 pixels are estimated at 3 us on
            an M1, and frames, whose rows of 4 are padded to 32, at 26 us (no measurement covers strided convs of so few
            channels). frames copy the input up to ceil(K / s) times on each axis, fold twice; upright takes two
            transposes, parts a pass over the input and an add each. For a fault of slices of large values on M1 and M2
            see ane::last_axis_slice.

    before
        %y: fp16[1, 4, 1, 2] = conv(x=%x, weight=<fp16[4, 3, 32, 32]>, strides=[32, 32], pad_type=same)
    after
        %0: fp16[3, 1, 32, 2, 32] = reshape(x=%x, shape=[3, 1, 32, 2, 32])
        %1: fp16[3, 32, 32, 1, 2] = transpose(x=%0, perm=[0, 2, 4, 1, 3])
        %2: fp16[1, 3072, 1, 2] = reshape(x=%1, shape=[1, 3072, 1, 2])
        %y: fp16[1, 4, 1, 2] = conv(x=%2, weight=<fp16[4, 3072, 1, 1]>)
    """

    fixes = (ConvKernelSize,)
    stage = "decompose"
    after = ("orient_conv",)
    exactness = Exactness.ROUNDING
    bound = ("stages, frames, upright and fold: the order of one sum. parts: in addition half a unit in the last place "
             "of each partial sum (31x31 in 6 parts: 9e-4 of the largest output, 3e-4 for the original conv)")
    preset = "full"
    roots = ("conv",)
    evidence = (
        *collect_evidence("conv-kernel-width", "conv-kernel-height"),
        cite_m4_study("kernel 16x16: 212 to 229 s and 11.7 GB to compile; 13x13: 2 to 23 s"),
    )

    slow: bool = True
    "Rewrite square kernels of 14 to 16 as well where they are only slow to compile."
    max_copies: int = 8
    "Maximum number of copies of the input in frames."
    max_parts: int = 16
    "Maximum number of convs that replace one."

    def find_problem(self, op: Operation) -> type[Rule]:
        """Return the rule that reports `op`: a kernel within the limit may be slow to compile."""
        problem = super().find_problem(op)
        return CompileTraps if problem is type(self) and CompileTraps().reports_op(op) else problem

    def match(self, op: Operation) -> Hit | Miss:
        large = self._find_large_axes(op)
        if not large:
            return Miss(op, "within the limits, or a 1-D kernel below 32", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        reason = find_reshape_obstacle(op.weight)
        if reason:
            return Miss(op, reason)
        pads = resolve_conv_pads(op)
        if isinstance(pads, str):
            return Miss(op, pads)
        sizes = read_conv_sizes(op, pads)
        plan = _plan_stages(op, sizes, large) or _plan_conv(
            sizes, large, sum(map(is_symbolic, op.x.shape)), self.max_copies, self.max_parts)
        if isinstance(plan, str):
            return Miss(op, plan)
        if plan.copies and is_compressed(op.weight):
            return Miss(op, f"weight is compressed, and {plan.form} would need recompression")
        if plan.copies and not has_uniform_readers(op, op.weight.op.enclosing_block, _read_conv_settings):
            return Miss(op, "weight has other users, so it would be stored twice")
        if plan.copies and op.weight.consuming_blocks:
            return Miss(op, "weight is returned by a block")
        return Hit(op, note=f"kernel {'x'.join(map(str, sizes.kernel))} as {plan.note}", plan=plan, sizes=sizes,
                   keeps_nonfinite=plan.form != "stages")

    def _find_large_axes(self, op: Operation) -> list[int]:
        """Return the spatial axes on which the kernel of `op` is too large."""
        kernel = op.weight.shape[2:]
        if any(map(is_symbolic, kernel)):
            return []
        if len(kernel) == 1:
            return [0] if kernel[0] > 31 else []
        exempt = _KERNEL_16_CHIPS if tuple(kernel) == (16, 16) else ()
        generations = [each for each in self.generations if each not in exempt]
        last = len(kernel) - 1
        found = [axis for axis, name in ((last - 1, "conv-kernel-height"), (last, "conv-kernel-width"))
                 if find_exceeded_limit(name, int(kernel[axis]), generations)]
        slow = len(kernel) == 2 and all(int(size) in _SLOW_KERNEL_SIZES for size in kernel)
        return [0, 1] if slow and (self.slow or found) else found

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        plan: _ConvPlan = hit.plan
        return plan.build(mb, hit.op, hit.sizes)

    def examples(self) -> Iterable[Example]:
        def make_case(name: str, x: tuple[int | None, ...], kernel: tuple[int, ...], **rest: Any) -> Example:
            return make_conv_example(name, x, (4, *kernel), **rest)

        bias = make_weight(4)
        yield make_case("patches", (1, 3, 32, 64), (3, 32, 32), strides=[32, 32], pad_type="same")
        yield make_conv_example("patches in stages", (1, 1, 48, 32), (16, 1, 16, 16), strides=[16, 16],
                                bias=make_weight(16))
        yield make_conv_example("overlapping windows in stages", (2, 2, 50, 40), (32, 1, 16, 24), strides=[8, 12],
                                groups=2, pad_type="custom", pad=[4, 5, 6, 7])
        yield make_case("overlapping windows", (1, 2, 40, 44), (2, 16, 16), strides=[10, 12], pad_type="same")
        yield make_case("a spectrum", (1, 1, 203), (1, 40), strides=[16], pad_type="custom", pad=[20, 20])
        yield make_case("one strided axis", (1, 2, 9, 80), (2, 3, 20), strides=[1, 20], pad_type="same")
        yield make_case("gaps", (1, 1, 203), (1, 40), strides=[50], pad_type="same")
        yield make_case("upright", (1, 2, 4, 40), (2, 1, 20), pad_type="same", bias=bias)
        yield make_case("folded", (1, 4, 50), (2, 64), groups=2, pad_type="custom", pad=[32, 31], within=200)
        yield make_case("parts", (2, 4, 20, 20), (1, 17, 17), groups=4, pad_type="same", bias=bias, within=200)
        yield make_case("dilated parts", (1, 2, 90), (2, 37), dilations=[2], pad_type="same", within=500)
        yield make_case("tall", (1, 2, 40, 3), (2, 35, 1), pad_type="same_lower", within=500)
        yield make_case("3-D", (1, 2, 3, 4, 16), (2, 2, 2, 16), pad_type="same", within=200)
        yield make_case("fits", (1, 2, 9, 30), (2, 3, 13), reason="within the limits, or a 1-D kernel below 32")
        yield make_case("fp32", (1, 2, 9, 30), (2, 1, 20), dtype=np.float32, reason=FP32_UNSUPPORTED_REASON)
        yield make_case("symbolic, same", (1, 2, 4, None), (2, 1, 20), strides=[1, 2], pad_type="same",
                        reason="pad_type same depends on the input's size, which is symbolic")
        yield make_case("too many parts", (1, 2, 4, 90), (2, 1, 40), options={"max_parts": 3},
                        reason="kernel 1x40 would need 4 parts, max_parts is 3")


def _plan_stages(op: Operation, sizes: ConvSizes, large: list[int]) -> _ConvPlan | None:
    """Plan two convs with kernels p and K / p, if the value between has at most as many channels as the result."""
    if op.x.rank != 4 or is_symbolic(op.x.shape[1]) or is_compressed(op.weight):
        return None
    steps = tuple(_find_stage(*each) for each in zip(sizes.kernel, sizes.strides, sizes.dilations))
    between = int(op.x.shape[1]) * math.prod(steps)
    if any(steps[axis] == 1 for axis in large) or between > int(op.weight.shape[0]):
        return None
    if op.weight.consuming_blocks or not has_uniform_readers(op, op.weight.op.enclosing_block, _read_conv_settings):
        return None  # frames show the very weight
    kernels = ["x".join(map(str, kernel)) for kernel in (steps, [q // p for q, p in zip(sizes.kernel, steps)])]
    return _ConvPlan("stages", f"stages of kernels {' and '.join(kernels)}", steps=steps, copies=True)


def _find_stage(kernel: int, stride: int, dilation: int) -> int:
    """Find the factor p of kernel and stride for which the larger of p and kernel / p is smallest, or return 1."""
    found = [p for p in range(2, _MAX_WIDTH + 1) if kernel % p == 0 and stride % p == 0 and kernel // p <= _MAX_WIDTH
             and divide_out_2_and_3(p) == divide_out_2_and_3(stride // p) == 1]
    return 1 if dilation != 1 else min(found, key=lambda p: max(p, kernel // p), default=1)


def _plan_conv(sizes: ConvSizes, large: list[int], symbolic: int, max_copies: int, max_parts: int) -> _ConvPlan | str:
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
        return _ConvPlan("frames", f"windows of {inside} as channels", axes=framed, copies=kept > 1)
    if len(sizes.kernel) > 1 and sizes.kernel[-2] == 1 and sizes.kernel[-1] <= _MAX_UPRIGHT_HEIGHT:
        turned = [*sizes.kernel[:-2], sizes.kernel[-1], 1]
        return _ConvPlan("upright", f"kernel {'x'.join(map(str, turned))}")
    rows = _factor_kernel(sizes, set(plain)) if symbolic < 2 else None
    if rows:
        return _ConvPlan("fold", f"kernel {rows[0]}x{rows[1]} over rows of {rows[1]}", rows=rows)
    pieces = tuple(
        tuple(split_evenly(size, _find_max_piece(axis, sizes.kernel) if may_split else size))
        for axis, size in enumerate(sizes.kernel)
        for may_split in [axis in large or axis >= len(sizes.kernel) - 2]
    )
    count = math.prod(map(len, pieces))
    if count > max_parts:
        return f"kernel {kernel} would need {count} parts, max_parts is {max_parts}"
    return _ConvPlan("parts", f"{count} parts that are added", pieces=pieces, copies=True)


@dataclass(frozen=True)
class _ConvPlan:
    """The form in which a conv is rewritten.

    `axes` (spatial) of frames, `pieces` (start, stop) of parts by axis, `steps` of stages: the p of each axis.

    With `copies`, the weight is stored again with another layout in as many bytes, so that all its readers must be
    rewritten with that layout.
    """

    form: Literal["stages", "frames", "upright", "fold", "parts"]
    note: str
    axes: tuple[int, ...] = ()
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    rows: tuple[int, int] = (0, 0)
    steps: tuple[int, ...] = ()
    copies: bool = False

    def build(self, mb: RewriteBuilder, op: Operation, sizes: ConvSizes) -> Var:
        if self.form == "stages":
            return _build_staged_convs(mb, op, sizes, self.steps)
        if self.form == "frames":
            return _build_framed_conv(mb, op, sizes, self.axes)
        if self.form == "upright":
            return _build_upright_conv(mb, op, sizes)
        if self.form == "fold":
            return _build_folded_conv(mb, op, sizes, *self.rows)
        return _build_summed_convs(mb, op, sizes, self.pieces)


def _build_staged_convs(mb: RewriteBuilder, op: Operation, sizes: ConvSizes, steps: tuple[int, ...]) -> Var:
    """Build the conv that makes channels of p x p elements, and the one over them, whose windows are p times shorter.

    Pads are the first one's: floor((floor(L / p) - q) / t) is floor((L - q * p) / (t * p)), so no position is cropped.
    """
    channels, (high, wide) = int(op.x.shape[1]), steps
    between = channels * high * wide
    copies = np.eye(between, dtype=types.nptype_from_builtin(op.x.dtype)).reshape(between, channels, high, wide)
    pads = [amount for pair in sizes.pads for amount in pair]
    settings: dict[str, Any] = {"pad_type": "custom", "pad": pads} if any(pads) else {"pad_type": "valid"}
    x = mb.conv(x=op.x, weight=mb.once(("stages", copies.shape, op.x.dtype), lambda: mb.const(val=copies)),
                strides=list(steps), **settings)
    outer, inner = map(int, op.weight.shape[:2])
    q, t = ([size // p for size, p in zip(of, steps)] for of in (sizes.kernel, sizes.strides))

    def make_stage_weight() -> np.ndarray[Any, Any]:
        apart = np.asarray(op.weight.val).reshape(outer, inner, q[0], high, q[1], wide)
        return apart.transpose(0, 1, 3, 5, 2, 4).reshape(outer, inner * high * wide, *q)

    weight = mb.weight(op.weight, f"stages_{high}x{wide}", make_stage_weight)
    return rebuild_op(mb, op, x=x, weight=weight, strides=t, pad_type="valid", pad=None)


def _build_framed_conv(mb: RewriteBuilder, op: Operation, sizes: ConvSizes, axes: tuple[int, ...]) -> Var:
    """Lay the windows out as channels on `axes`, then build a conv whose kernel is 1 there."""
    rows = {axis: sizes.counts[axis] + -(-sizes.kernel[axis] // sizes.strides[axis]) - 1 for axis in axes}
    fitted = pad_or_crop(mb, op.x, {axis: (sizes.pads[axis][0], rows[axis] * sizes.strides[axis]) for axis in axes})
    shape = get_reshape_extents(fitted.shape)
    # Batch and channels as one axis, so that the rank stays within 5; then each spatial axis, in two parts if framed.
    dims: list[list[int]] = [[-1 if -1 in shape[:2] else shape[0] * shape[1]], *([extent] for extent in shape[2:])]
    x, current = fitted, shape
    for axis in axes:
        count, kernel, stride = sizes.counts[axis], sizes.kernel[axis], sizes.strides[axis]
        dims[1 + axis] = [rows[axis], stride]
        if kernel != stride:
            at = len(_flatten_dims(dims[:1 + axis]))
            x = _build_windows(mb, mb.reshape(x=x, shape=_flatten_dims(dims)), at, count, kernel, stride)
            dims[1 + axis] = [count, kernel]
            current = _flatten_dims(dims)
    flat = _flatten_dims(dims)
    if flat != current:
        x = mb.reshape(x=x, shape=flat)
    inside = [len(_flatten_dims(dims[:1 + axis])) + 1 for axis in axes]
    x = mb.transpose(x=x, perm=[0, *inside, *(at for at in range(1, len(flat)) if at not in inside)])
    taps = math.prod(sizes.kernel[axis] for axis in axes)
    x = mb.reshape(x=x, shape=[shape[0], shape[1] * taps, *(dim[0] for dim in dims[1:])])
    weight = _build_frame_weight(mb, op, sizes, axes, taps)
    return rebuild_op(mb, op, x=x, weight=weight, **make_neutral_settings(sizes, axes))


def _flatten_dims(dims: list[list[int]]) -> list[int]:
    return [*itertools.chain(*dims)]


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


def _build_upright_conv(mb: RewriteBuilder, op: Operation, sizes: ConvSizes) -> Var:
    """Build the conv with its kernel on the height: the last two axes of input and result are swapped."""
    turn = [*range(op.x.rank - 2), op.x.rank - 1, op.x.rank - 2]
    spatial = [axis - 2 for axis in turn[2:]]
    pads = [amount for axis in spatial for amount in sizes.pads[axis]]
    settings: dict[str, Any] = {"pad_type": "custom", "pad": pads} if any(pads) else {"pad_type": "valid", "pad": None}
    settings["strides"] = [sizes.strides[axis] for axis in spatial]
    settings["dilations"] = [sizes.dilations[axis] for axis in spatial]
    weight = reshape_weight(mb, op.weight, tuple(op.weight.shape[axis] for axis in turn))
    made = rebuild_op(mb, op, x=mb.transpose(x=op.x, perm=turn), weight=weight, **settings)
    back: Var = mb.transpose(x=made, perm=turn)
    return back


def _build_folded_conv(mb: RewriteBuilder, op: Operation, sizes: ConvSizes, q: int, p: int) -> Var:
    """Build a 1-D conv as a 2-D one over rows of p elements, each with the p - 1 that follow it."""
    (count,) = sizes.counts
    rows = -(-count // p)
    x = pad_or_crop(mb, op.x, {0: (sizes.pads[0][0], (rows + q) * p)})
    batch, channels = get_reshape_extents(x.shape)[:2]
    apart = mb.reshape(x=x, shape=[batch, channels, rows + q, p])
    own = crop_ends(mb, apart, [0, 0, rows + q - 1, 0])
    after = mb.slice_by_index(x=apart, begin=[0, 0, 1, 0], end=[0, 0, 0, p - 1], end_mask=[True, True, True, False])
    weight = reshape_weight(mb, op.weight, (*op.weight.shape[:2], q, p))
    made = rebuild_op(mb, op, x=mb.concat(values=[own, after], axis=3), weight=weight, strides=[1, 1], dilations=[1, 1],
                      pad_type="valid", pad=None)
    y: Var = mb.reshape(x=made, shape=[batch, int(op.weight.shape[0]), rows * p])
    return crop_ends(mb, y, [0, 0, count]) if rows * p > count else y


def _build_summed_convs(
    mb: RewriteBuilder, op: Operation, sizes: ConvSizes, pieces: tuple[tuple[tuple[int, int], ...], ...]
) -> Var:
    """Build one conv for each piece of the kernel, the first one with the bias, and add their results."""
    cut = tuple(axis for axis, parts in enumerate(pieces) if len(parts) > 1)
    before, behind = ([0, 0, *(pair[side] if axis in cut else 0 for axis, pair in enumerate(sizes.pads))]
                      for side in (0, 1))
    x = pad_with_zeros(mb, op.x, before, behind)
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


def _factor_kernel(sizes: ConvSizes, plain: set[int]) -> tuple[int, int] | None:
    """Factor the K of a 1-D conv of stride 1 into (q, p) within the limits, as square as possible, or return None."""
    if len(sizes.kernel) > 1 or sizes.strides != [1] or plain != {0}:
        return None
    size = sizes.kernel[0]
    found = [(size // p, p) for p in range(2, _MAX_WIDTH + 1) if size % p == 0 and size // p <= _MAX_HEIGHT]
    return min(found, key=lambda rows: abs(rows[0] - rows[1]), default=None)


def _find_max_piece(axis: int, kernel: list[int]) -> int:
    """Return the largest piece on `axis`; it is larger where only the height has a kernel."""
    if axis == len(kernel) - 1:
        return _MAX_WIDTH
    return _MAX_UPRIGHT_HEIGHT if kernel[-1] == 1 else _MAX_HEIGHT


def _read_conv_settings(op: Operation) -> tuple[Any, ...]:
    """Return the parameters of a conv that determine its form and pieces."""
    return (op.x.dtype, get_const_value(op.strides), get_const_value(op.dilations), get_const_value(op.groups),
            [is_symbolic(extent) for extent in op.x.shape])
