"""Compute a strided conv as a conv of stride 1 over the phases of its input.

With k = q * s + r, tap k at output t reads element (t + q) * s + r: tap q at t of phase r. So the phases become
channels (channel c becomes c * s ... c * s + s - 1, which keeps groups together) and the taps of a phase its kernel.
Windows on two axes that do not overlap can also be laid out in rows: the phases of the first axis become channels, and
each window of the second one a row, which a kernel as long reads at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_itemsize, get_reshape_extents, is_compressed, is_const, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_apple_authoring_rules, cite_m4_study
from ...passes.examples import make_weight
from ...passes.layout import compute_padded_bytes
from .._target_gate import find_length_obstacle
from .._weights import has_uniform_readers, reshape_weight
from ._conv_geometry import crop_ends, divide_out_2_and_3, pad_or_crop, resolve_conv_pads
from ._examples import make_conv_example

_MAX_ROW, _MAX_ROWS = 31, 16384
"Tallest kernel and longest axis that a chip is known to support, for windows laid out in rows."


class FactorConvStride(Rewrite):
    """Compute a conv whose stride has prime factors other than 2 and 3 as one of stride 1 over phases of its input.

    why     Such strides (5, 7, 10, ...) made the ANE's compiler hang or take half a minute. An iPad whose log says
            "Strides of Conv needs to be product of at most 2 interleave factors" gave wrong outputs; whether the stride
            is the cause is not verified. The reports contradict each other: on an M4 strides 2 to 8 all work, in the
            first report 13 and 14 compiled fast, and one hang is for stride 6, which is not rewritten.
    when    fp16; an axis of static size without dilation, a constant weight without other users. Other axes keep their
            stride. form=slice also supports dilated, compressed, 3-D and symbolic convs. Not if the resulting length
            exceeds the limit of a chip of the target and that of x does not.
    exact   rounding: the same products, added in a different order. If the kernel is longer than the stride and not a
            multiple of it, zeros are multiplied, too: an infinite or NaN input may then affect neighbouring outputs.
            form=slice is bitwise.
    cost    the weight is stored in a new layout, at most ceil(K / s) * s / K times its bytes on each axis whose kernel
            is longer than its stride. The input is moved three times; patches on both axes are moved four times, to
            rows, if padding to 64 bytes makes this smaller. form=slice keeps weight and input and computes s times as
            much.

    before
        %y: fp16[1, 4, 4] = conv(x=%x, weight=<fp16[4, 3, 10]>, strides=[5], pad_type=custom, pad=[1, 1])
    after
        %0: fp16[1, 3, 25] = pad(x=%x, pad=[0, 0, 0, 0, 1, 1])
        %1: fp16[1, 3, 5, 5] = reshape(x=%0, shape=[1, 3, 5, 5])
        %2: fp16[1, 3, 5, 5] = transpose(x=%1, perm=[0, 1, 3, 2])
        %3: fp16[1, 15, 5] = reshape(x=%2, shape=[1, 15, 5])
        %y: fp16[1, 4, 4] = conv(x=%3, weight=<fp16[4, 15, 2]>)
    """

    code, slug = "ANE314", "conv-stride-prime-factors"
    severity = Severity.WRONG
    stage = "numerics"
    exactness = Exactness.ROUNDING
    bound = "the rounding of the same sum of products in a different order"
    preset = "full"
    roots = ("conv",)
    evidence = (
        Community(
            "Conv2d strides 5 and 7: conversion stopped after 5 minutes; 10 and 11: 30 s; 1 to 4, 6, 8, 9 and "
            "12 to 18: below 10 s",
            source="https://github.com/apple/coremltools/issues/2473",
            date="2025-03",
        ),
        Community(
            "an iPad logs that strides need to be a product of at most 2 interleave factors, and its outputs are "
            "wrong; with target iOS15 instead of iOS16 they are right",
            source="https://github.com/apple/coremltools/issues/2173",
            date="2024-03",
        ),
        Community(
            "fp16, kernel 12, stride 6 on a length of 18001: loading for the ANE hangs; fp32 and the GPU do not "
            "(against the above)",
            source="https://github.com/apple/coremltools/issues/2660",
            date="2026-03",
        ),
        cite_apple_authoring_rules(
            "strides to use: 4, 6, 8, 9, 12, 16, 24, 32; otherwise pixel shuffle or transpose tricks"
        ),
        cite_m4_study("strides 2 to 8 are all supported (against the above)"),
    )

    form: Literal["phase", "slice"] = "phase"
    "phase: conv over phases of the input; slice: stride 1, keeping every s-th output."

    def match(self, op: Operation) -> Hit | Miss:
        axes = find_awkward_stride_axes(op)
        if not axes:
            return Miss(op, "every stride is a product of 2s and 3s", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        pads = resolve_conv_pads(op)
        if isinstance(pads, str):
            return Miss(op, pads)
        reason = _find_phase_obstacle(op, axes) if self.form == "phase" else None
        if reason:
            return Miss(op, reason)
        longest = max((int(extent) for axis in axes if not is_symbolic(extent := op.x.shape[2 + axis])), default=0)
        lengths = _compute_new_lengths(op, axes, pads, self.form == "phase")
        reason = find_length_obstacle(lengths, self.generations, longest)
        if reason:
            return Miss(op, reason)
        strides = ", ".join(str(get_const_value(op.strides)[axis]) for axis in axes)
        exactness = Exactness.BITWISE if self.form == "slice" else None
        fits = all(op.weight.shape[2 + axis] % get_const_value(op.strides)[axis] == 0 for axis in axes)
        # Where the kernel does not fit, it gets zeros as further taps, which turn an infinity into NaN.
        return Hit(op, note=f"stride {strides} as {self.form}s", exactness=exactness, axes=axes, pads=pads,
                   keeps_nonfinite=fits or self.form == "slice")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, axes = hit.op, hit.axes
        steps = get_const_value(op.strides)
        changes: dict[str, Any] = {"strides": [1 if axis in axes else step for axis, step in enumerate(steps)]}
        if self.form == "slice":
            changes |= {"pad_type": "custom", "pad": [amount for pair in hit.pads for amount in pair]}
            dense = rebuild_op(mb, op, **changes)
            subsampling = [step if axis in axes else 1 for axis, step in enumerate(steps)]
            zeros = [0] * dense.rank
            every: Var = mb.slice_by_index(x=dense, begin=zeros, end=zeros, stride=[1, 1, *subsampling],
                                           end_mask=[True] * dense.rank)
            return every
        if _has_rows_layout(op):
            return _build_conv_over_rows(mb, op, hit.pads)
        left = [(0, 0) if axis in axes else pair for axis, pair in enumerate(hit.pads)]
        if any(map(any, left)):
            changes |= {"pad_type": "custom", "pad": [amount for pair in left for amount in pair]}
        else:
            changes |= {"pad_type": "valid", "pad": None}
        x, weight = _build_phase_input(mb, op, axes, hit.pads), _build_phase_weight(mb, op, axes)
        return rebuild_op(mb, op, x=x, weight=weight, **changes)

    def examples(self) -> Iterable[Example]:
        def as_case(name: str, x: tuple[int | None, ...], kernel: int, stride: int = 5, groups: int = 1,
                    **rest: Any) -> Example:
            weight = (4, (x[1] or 1) // groups, kernel)
            return make_conv_example(name, x, weight, strides=[stride], groups=groups, **rest)

        image = partial(make_conv_example, x=(1, 2, 16, 23))
        bias = make_weight(4)
        by_slice = {"form": "slice"}
        symbolic = "the strided axis, or more than one axis, is of symbolic size; form=slice keeps it"
        yield as_case("kernel twice the stride", (1, 3, 23), 10, pad_type="custom", pad=[1, 1])
        yield as_case("kernel of no multiple of the stride", (1, 3, 27), 7, bias=bias, within=1000)
        yield as_case("padded, grouped", (2, 4, 31), 7, 7, groups=2, bias=bias, pad_type="custom", pad=[3, 2])
        yield as_case("a tail nobody reads", (1, 3, 29), 5, bias=bias)
        yield as_case("same", (1, 3, 24), 5, bias=bias, pad_type="same")
        yield image("two axes", weight=(4, 2, 5, 7), strides=[5, 7])
        yield image("windows in rows", x=(1, 2, 16, 30), weight=(4, 2, 4, 6), strides=[5, 7], bias=bias)
        yield image("kernel shorter than the stride", weight=(4, 2, 3, 1), strides=[5, 7])
        yield image("one of two axes", weight=(4, 2, 3, 10), strides=[2, 5], pad_type="custom", pad=[1, 1, 2, 2])
        yield as_case("slice", (1, 3, 26), 4, bias=bias, dilations=[2], pad_type="custom", pad=[1, 2], options=by_slice)
        yield image("slice, one of two axes", weight=(4, 2, 3, 4), strides=[5, 3], pad_type="same", options=by_slice)
        yield as_case("2s and 3s", (1, 3, 40), 8, 6, bias=bias, reason="every stride is a product of 2s and 3s")
        yield as_case("fp32", (1, 3, 25), 10, bias=make_weight(4, dtype=np.float32), dtype=np.float32,
                      reason=FP32_UNSUPPORTED_REASON)
        yield as_case("dilated", (1, 3, 25), 3, bias=bias, dilations=[2],
                      reason="dilated along the strided axis; form=slice keeps the dilation")
        yield as_case("long", (1, 3, 16384), 10, bias=bias, pad_type="same", reason=(
            "a value of length 16390 would be created: > 16384 (M1, M2 and M3; assumed on A12 and A13)"))
        yield as_case("symbolic", (1, 3, None), 5, bias=bias, reason=symbolic)
        yield as_case("symbolic, same", (1, 3, None), 5, bias=bias, pad_type="same",
                      reason="pad_type same depends on the input's size, which is symbolic")


def find_awkward_stride_axes(op: Operation) -> list[int]:
    """Return the spatial axes whose stride has a prime factor other than 2 and 3."""
    return [axis for axis, stride in enumerate(get_const_value(op.strides, [])) if divide_out_2_and_3(stride) > 1]


def _find_phase_obstacle(op: Operation, axes: list[int]) -> str | None:
    """Return why `op` cannot be laid out in the phases of `axes`, or None when it can."""
    if is_compressed(op.weight):
        return "weight is compressed, and its phases would need recompression; form=slice keeps it"
    if not is_const(op.weight):
        return "weight is computed, not a const"
    if op.x.rank == 5:
        return "x has rank 5, and its phases would need rank 6; form=slice does without"
    if any(get_const_value(op.dilations, [1] * 3)[axis] != 1 for axis in axes):
        return "dilated along the strided axis; form=slice keeps the dilation"
    if any(is_symbolic(op.x.shape[2 + axis]) for axis in axes) or sum(map(is_symbolic, op.x.shape)) > 1:
        return "the strided axis, or more than one axis, is of symbolic size; form=slice keeps it"
    if not has_uniform_readers(op, op.weight.op.enclosing_block, _read_layout_settings):
        return "weight has other users, so its phases would store it twice; form=slice keeps it"
    return "weight is returned by a block" if op.weight.consuming_blocks else None


def _read_layout_settings(op: Operation) -> tuple[Any, ...]:
    """Return the properties of a conv that decide how its weight is laid out in phases."""
    return (op.x.rank, op.x.dtype, get_const_value(op.strides), get_const_value(op.dilations),
            get_const_value(op.groups), _has_rows_layout(op))


def _compute_new_lengths(op: Operation, axes: list[int], pads: list[tuple[int, int]], phases: bool) -> list[int]:
    """Compute the lengths of the `axes` of known size: of the input in whole phases, or of the outputs at stride 1."""
    if phases:
        return [_compute_phased_length(op, axis) for axis in axes]
    dilations = get_const_value(op.dilations, [1] * 3)
    return [int(op.x.shape[2 + axis]) + sum(pads[axis]) - (int(op.weight.shape[2 + axis]) - 1) * int(dilations[axis])
            for axis in axes if not is_symbolic(op.x.shape[2 + axis])]


def _compute_phased_length(op: Operation, axis: int) -> int:
    """Compute the length of an axis that the taps read, in whole phases."""
    stride, kernel = int(get_const_value(op.strides)[axis]), int(op.weight.shape[2 + axis])
    return (int(op.outputs[0].shape[2 + axis]) - 1 + -(-kernel // stride)) * stride


def _build_phase_input(mb: RewriteBuilder, op: Operation, axes: list[int], pads: list[tuple[int, int]]) -> Var:
    """Pad or cut x on `axes` to exactly what the taps read, and lay out these axes in their phases."""
    wanted = {axis: (pads[axis][0], _compute_phased_length(op, axis)) for axis in axes}
    x = pad_or_crop(mb, op.x, wanted)
    steps = get_const_value(op.strides)
    first = [steps[at - 2] if at - 2 in axes and _count_phases(op, at - 2) == 1 else 1 for at in range(x.rank)]
    if max(first) > 1:
        zeros = [0] * x.rank
        x = mb.slice_by_index(x=x, begin=zeros, end=zeros, stride=first, end_mask=[True] * x.rank)
    phases = {2 + axis: (steps[axis], _count_phases(op, axis)) for axis in axes if _count_phases(op, axis) > 1}
    return _move_phases_to_channels(mb, x, phases) if phases else x


def _move_phases_to_channels(mb: RewriteBuilder, x: Var, phases: dict[int, tuple[int, int]]) -> Var:
    """Reshape [N, C, ..., L, ...] to [N, C * p, ..., L / s, ...] for each axis L of `phases`: its s and first p."""
    shape = get_reshape_extents(x.shape)
    front = shape[:2]
    if len(shape) + len(phases) > 5:  # a rank above 5 is unsupported: batch and channels as one axis
        front = [-1 if -1 in shape[:2] else shape[0] * shape[1]]
    apart: list[int] = [*front]
    inside: dict[int, int] = {}
    for at in range(2, len(shape)):
        if at not in phases:
            apart.append(shape[at])
            continue
        inside[len(apart) + 1] = phases[at][1]
        apart += [shape[at] // phases[at][0], phases[at][0]]
    laid = mb.reshape(x=x, shape=apart)
    if any(inside[at] < apart[at] for at in inside):
        laid = crop_ends(mb, laid, [inside.get(at, 0) for at in range(laid.rank)])
    moved = mb.transpose(x=laid, perm=[*range(len(front)), *inside, *(
        at for at in range(len(front), len(apart)) if at not in inside)])
    rest = [shape[at] // phases[at][0] if at in phases else shape[at] for at in range(2, len(shape))]
    joined: Var = mb.reshape(x=moved, shape=[shape[0], shape[1] * math.prod(inside.values()), *rest])
    return joined


def _has_rows_layout(op: Operation) -> bool:
    """Return whether two axes of windows that do not overlap move fewer padded bytes in rows than in phases."""
    axes = find_awkward_stride_axes(op)
    if axes != [0, 1] or op.x.rank != 4 or any(map(is_symbolic, op.outputs[0].shape)):
        return False
    kernel, strides = [int(extent) for extent in op.weight.shape[2:]], get_const_value(op.strides)
    batch, outer, height, width = map(int, op.outputs[0].shape)
    if kernel[0] > strides[0] or not 1 < kernel[1] <= min(strides[1], _MAX_ROW) or height * width > _MAX_ROWS:
        return False
    maps, itemsize = batch * int(op.x.shape[1]), get_itemsize(op.x)
    shapes = {
        "phases": [(maps * height * strides[0] * width, strides[1]), *[(maps * math.prod(kernel) * height, width)] * 2],
        "rows": [(maps * height * strides[0], width * strides[1]), (maps * kernel[0] * height, width * strides[1]),
                 (maps * kernel[0] * height * width, strides[1]), (maps * math.prod(kernel), height * width),
                 (batch * outer * height, width)]}
    moved = {form: sum(compute_padded_bytes(shape, itemsize) for shape in made) for form, made in shapes.items()}
    return moved["rows"] < moved["phases"]


def _build_conv_over_rows(mb: RewriteBuilder, op: Operation, pads: list[tuple[int, int]]) -> Var:
    """Build the conv over windows as rows: [N, C, H, W] to [N, C * K0, K1, h * w], read by a kernel K1 x 1."""
    strides, kernel = get_const_value(op.strides), [int(extent) for extent in op.weight.shape[2:]]
    x = pad_or_crop(mb, op.x, {axis: (pads[axis][0], _compute_phased_length(op, axis)) for axis in (0, 1)})
    batch, channels = get_reshape_extents(x.shape)[:2]
    outer, height, width = map(int, op.outputs[0].shape[1:])
    x = mb.reshape(x=x, shape=[batch, channels, height, strides[0], width * strides[1]])
    if kernel[0] < strides[0]:
        x = crop_ends(mb, x, [0, 0, 0, kernel[0], 0])
    x = mb.transpose(x=x, perm=[0, 1, 3, 2, 4])
    x = mb.reshape(x=x, shape=[batch, channels * kernel[0], height * width, strides[1]])
    if kernel[1] < strides[1]:
        x = crop_ends(mb, x, [0, 0, 0, kernel[1]])
    shape = (outer, int(op.weight.shape[1]) * kernel[0], kernel[1], 1)
    made = rebuild_op(mb, op, x=mb.transpose(x=x, perm=[0, 1, 3, 2]), weight=reshape_weight(mb, op.weight, shape),
                      strides=[1, 1], pad_type="valid", pad=None)
    y: Var = mb.reshape(x=made, shape=[batch, outer, height, width])
    return y


def _count_phases(op: Operation, axis: int) -> int:
    """Count the phases of an axis that the kernel reads."""
    return min(int(get_const_value(op.strides)[axis]), int(op.weight.shape[2 + axis]))


def _build_phase_weight(mb: RewriteBuilder, op: Operation, axes: list[int]) -> Var:
    """Reshape the weight [O, I, ..., K, ...] to [O, I * s, ..., ceil(K / s), ...] for each axis.

    Zeros are added where K ends early. A kernel shorter than the stride reads its own K phases only: [O, I * K, ..., 1,
    ...].
    """
    strides = get_const_value(op.strides)

    def make_weight_array() -> np.ndarray[Any, Any]:
        packed = np.asarray(op.weight.val)
        for axis in axes:
            packed = _split_weight_axis(packed, 2 + axis, _count_phases(op, axis))
        return packed

    return mb.weight(op.weight, f"phases_{'x'.join(map(str, strides))}", make_weight_array)


def _split_weight_axis(weight: np.ndarray[Any, Any], at: int, stride: int) -> np.ndarray[Any, Any]:
    missing = -weight.shape[at] % stride
    padded = np.pad(weight, [(0, missing if number == at else 0) for number in range(weight.ndim)])
    shape, taps = padded.shape, padded.shape[at] // stride
    apart = np.moveaxis(padded.reshape(*shape[:at], taps, stride, *shape[at + 1:]), at + 1, 2)
    return apart.reshape(shape[0], shape[1] * stride, *shape[2:at], taps, *shape[at + 1:])
