"""Conversion of a strided convolution to one of stride 1 over the phases of its input.

With k = q * s + r, tap k at output t reads element (t + q) * s + r: tap q at t of phase r. So the phases become
channels (channel c becomes c * s ... c * s + s - 1, which keeps groups together) and the taps of a phase its kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_compressed, is_const, is_symbolic
from .._weights import has_uniform_readers

__all__ = [
    "build_phase_input",
    "build_phase_weight",
    "compute_new_lengths",
    "find_awkward_stride_axes",
    "find_phase_obstacle",
    "move_phases_to_batch",
    "resolve_conv_pads",
    "restore_phases_from_batch",
]


def find_awkward_stride_axes(op: Operation) -> list[int]:
    """Return the spatial axes whose stride has a prime factor other than 2 and 3."""
    return [axis for axis, stride in enumerate(get_const_value(op.strides, [])) if _divide_out_2_and_3(stride) > 1]


def _divide_out_2_and_3(stride: int) -> int:
    """Divide `stride` by 2 and 3 as often as possible and return the rest."""
    for factor in (2, 3):
        while stride % factor == 0:
            stride //= factor
    return stride


def resolve_conv_pads(op: Operation) -> list[tuple[int, int]] | str:
    """Return (before, after) for each spatial axis with `same` resolved, or why the pads are not fixed numbers."""
    kind, axes = get_const_value(op.pad_type, "valid"), range(op.x.rank - 2)
    if kind == "valid":
        return [(0, 0) for _ in axes]
    if kind == "custom":
        flat = get_const_value(op.pad, [0] * 2 * len(axes))
        return [(flat[2 * axis], flat[2 * axis + 1]) for axis in axes]
    pads = []
    for axis in axes:
        extent, kernel = op.x.shape[2 + axis], int(op.weight.shape[2 + axis])
        stride, dilation = get_const_value(op.strides, [1] * 3)[axis], get_const_value(op.dilations, [1] * 3)[axis]
        total = (kernel - 1) * dilation
        if is_symbolic(extent) and stride != 1:
            return f"pad_type {kind} pads by the input's size, which is symbolic"
        if not is_symbolic(extent):
            total = max((-(-int(extent) // stride) - 1) * stride + total + 1 - int(extent), 0)
        small, large = total // 2, total - total // 2
        pads.append((large, small) if kind == "same_lower" else (small, large))
    return pads


def find_phase_obstacle(op: Operation, axes: list[int]) -> str | None:
    """Return why `op` cannot be laid out in the phases of `axes`, or None when it can."""
    if is_compressed(op.weight):
        return "weight is compressed, and its phases would have to be packed anew; form=slice keeps it"
    if not is_const(op.weight):
        return "weight is computed, not a const"
    if op.x.rank == 5:
        return "x has rank 5, and its phases would need rank 6; form=slice does without"
    if any(get_const_value(op.dilations, [1] * 3)[axis] != 1 for axis in axes):
        return "dilated along the strided axis; form=slice keeps the dilation"
    if any(is_symbolic(op.x.shape[2 + axis]) for axis in axes) or sum(map(is_symbolic, op.x.shape)) > 1:
        return "the strided axis, or more than one axis, is of symbolic size; form=slice keeps it"
    if not has_uniform_readers(op, op.weight.op.enclosing_block, _read_layout_settings):
        return "weight is read in another way as well, so its phases would store it twice; form=slice keeps it"
    return "weight is returned by a block" if op.weight.consuming_blocks else None


def _read_layout_settings(op: Operation) -> tuple[Any, ...]:
    """Return the properties of a conv that decide how its weight is laid out in phases."""
    return op.x.rank, op.x.dtype, get_const_value(op.strides), get_const_value(op.dilations), get_const_value(op.groups)


def build_phase_weight(mb: RewriteBuilder, op: Operation, axes: list[int]) -> Var:
    """Reshape the weight [O, I, ..., K, ...] to [O, I * s, ..., ceil(K / s), ...] for each axis.

    Zeros are added where K ends early. A kernel shorter than the stride reads its own K phases only: [O, I * K, ..., 1,
    ...].
    """
    strides = get_const_value(op.strides)

    def make() -> np.ndarray[Any, Any]:
        packed = np.asarray(op.weight.val)
        for axis in axes:
            packed = _split_weight_axis(packed, 2 + axis, _count_phases(op, axis))
        return packed

    return mb.weight(op.weight, f"phases_{'x'.join(map(str, strides))}", make)


def _split_weight_axis(weight: np.ndarray[Any, Any], at: int, stride: int) -> np.ndarray[Any, Any]:
    missing = -weight.shape[at] % stride
    whole = np.pad(weight, [(0, missing if number == at else 0) for number in range(weight.ndim)])
    shape, taps = whole.shape, whole.shape[at] // stride
    apart = np.moveaxis(whole.reshape(*shape[:at], taps, stride, *shape[at + 1:]), at + 1, 2)
    return apart.reshape(shape[0], shape[1] * stride, *shape[2:at], taps, *shape[at + 1:])


def compute_new_lengths(op: Operation, axes: list[int], pads: list[tuple[int, int]], phases: bool) -> list[int]:
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


def build_phase_input(mb: RewriteBuilder, op: Operation, axes: list[int], pads: list[tuple[int, int]]) -> Var:
    """Pad or cut x on `axes` to exactly what the taps read, and lay out each of these axes in its phases."""
    x: Var = op.x
    spatial = range(x.rank - 2)
    before, more = [0] * len(spatial), [0] * len(spatial)
    for axis in axes:
        before[axis], more[axis] = (
            pads[axis][0],
            _compute_phased_length(op, axis) - pads[axis][0] - int(x.shape[2 + axis]),
        )
    if min(more) < 0:
        ends = [0, 0, *(min(extra, 0) for extra in more)]
        x = mb.slice_by_index(x=x, begin=[0] * len(ends), end=ends, end_mask=[end == 0 for end in ends])
    if any(before) or max(more) > 0:
        flat = [amount for axis in spatial for amount in (before[axis], max(more[axis], 0))]
        x = mb.pad(x=x, pad=[0, 0, 0, 0, *flat], mode="constant", constant_val=_make_zero(x))
    for axis in axes:
        x = _move_phases_to_channels(mb, x, 2 + axis, get_const_value(op.strides)[axis], _count_phases(op, axis))
    return x


def _count_phases(op: Operation, axis: int) -> int:
    """Count the phases of an axis that the kernel reads."""
    return min(int(get_const_value(op.strides)[axis]), int(op.weight.shape[2 + axis]))


def _make_zero(x: Var) -> Any:
    return types.nptype_from_builtin(x.dtype)(0)


def _move_phases_to_channels(mb: RewriteBuilder, x: Var, at: int, stride: int, phases: int) -> Var:
    """Reshape [N, C, ..., L, ...] to [N, C * p, ..., L / s, ...], with the first p phases."""
    if phases == 1:
        steps = [stride if number == at else 1 for number in range(x.rank)]
        zeros = [0] * x.rank
        first: Var = mb.slice_by_index(x=x, begin=zeros, end=zeros, stride=steps, end_mask=[True] * x.rank)
        return first
    shape = [-1 if is_symbolic(extent) else int(extent) for extent in x.shape]
    apart = [*shape[:at], shape[at] // stride, stride, *shape[at + 1:]]
    order = [0, 1, at + 1, *(number for number in range(2, len(apart)) if number != at + 1)]
    laid = mb.reshape(x=x, shape=apart)
    if phases < stride:
        ends = [phases if number == at + 1 else 0 for number in range(laid.rank)]
        laid = mb.slice_by_index(x=laid, begin=[0] * laid.rank, end=ends, end_mask=[end == 0 for end in ends])
    moved = mb.transpose(x=laid, perm=order)
    joined: Var = mb.reshape(x=moved, shape=[shape[0], shape[1] * phases, *shape[2:at], apart[at], *shape[at + 1:]])
    return joined


def _make_reshape_shape(x: Var) -> list[int]:
    return [-1 if is_symbolic(extent) else int(extent) for extent in x.shape]


def move_phases_to_batch(mb: RewriteBuilder, x: Var, at: int, step: int) -> Var:
    """Reshape [N, C, ..., L, ...] to [N * step, C, ..., L / step, ...]: the phases of an axis become batch."""
    shape = _make_reshape_shape(x)
    x = mb.reshape(x=x, shape=[*shape[:at], shape[at] // step, step, *shape[at + 1:]])
    x = mb.transpose(x=x, perm=[0, at + 1, *(axis for axis in range(1, x.rank) if axis != at + 1)])
    joined: Var = mb.reshape(x=x, shape=[max(-1, shape[0] * step), *shape[1:at], shape[at] // step, *shape[at + 1:]])
    return joined


def restore_phases_from_batch(mb: RewriteBuilder, x: Var, at: int, step: int) -> Var:
    """Move the phases from the batch back to their axis: the inverse of `move_phases_to_batch`."""
    shape = _make_reshape_shape(x)
    x = mb.reshape(x=x, shape=[shape[0] // step if shape[0] > 0 else -1, step, *shape[1:]])
    x = mb.transpose(x=x, perm=[0, *range(2, at + 2), 1, *range(at + 2, x.rank)])
    joined: Var = mb.reshape(x=x, shape=[*_make_reshape_shape(x)[:at], shape[at] * step, *shape[at + 1:]])
    return joined
