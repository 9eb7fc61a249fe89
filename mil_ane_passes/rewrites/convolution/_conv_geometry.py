"""Geometry of convs: their sizes and pads as numbers, and inputs that are padded or cropped to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic

__all__ = [
    "ConvSizes",
    "crop_ends",
    "divide_out_2_and_3",
    "make_neutral_settings",
    "pad_or_crop",
    "pad_with_zeros",
    "read_conv_sizes",
    "resolve_conv_pads",
]


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
            return f"pad_type {kind} depends on the input's size, which is symbolic"
        if not is_symbolic(extent):
            total = max((-(-int(extent) // stride) - 1) * stride + total + 1 - int(extent), 0)
        small, large = total // 2, total - total // 2
        pads.append((large, small) if kind == "same_lower" else (small, large))
    return pads


def make_neutral_settings(sizes: ConvSizes, axes: tuple[int, ...], pads: bool = True) -> dict[str, Any]:
    """Return stride, dilation and padding, neutral on `axes`."""
    left = [(0, 0) if axis in axes else pair for axis, pair in enumerate(sizes.pads)]
    padded = {"pad_type": "custom", "pad": [amount for pair in left for amount in pair]}
    return {"strides": [1 if axis in axes else step for axis, step in enumerate(sizes.strides)],
            "dilations": [1 if axis in axes else step for axis, step in enumerate(sizes.dilations)],
            **(padded if pads and any(map(any, left)) else {"pad_type": "valid", "pad": None})}


def pad_or_crop(mb: RewriteBuilder, x: Var, wanted: dict[int, tuple[int, int]]) -> Var:
    """Pad `x` with zeros or crop it, so that each spatial axis has the wanted (before, length)."""
    before, more = [0] * x.rank, [0] * x.rank
    for axis, (zeros, length) in wanted.items():
        before[2 + axis], more[2 + axis] = zeros, length - zeros - int(x.shape[2 + axis])
    if min(more) < 0:
        x = crop_ends(mb, x, [min(extra, 0) for extra in more])
    return pad_with_zeros(mb, x, before, [max(extra, 0) for extra in more])


def crop_ends(mb: RewriteBuilder, x: Var, ends: list[int]) -> Var:
    """Slice `x` from the front up to `ends`, one for each axis; 0 keeps all of an axis."""
    cropped: Var = mb.slice_by_index(x=x, begin=[0] * len(ends), end=ends, end_mask=[end == 0 for end in ends])
    return cropped


def pad_with_zeros(mb: RewriteBuilder, x: Var, before: list[int], behind: list[int]) -> Var:
    """Pad each axis of `x` with `before` and `behind` zeros."""
    if not any(before) and not any(behind):
        return x
    flat = [amount for pair in zip(before, behind) for amount in pair]
    padded: Var = mb.pad(x=x, pad=flat, mode="constant", constant_val=types.nptype_from_builtin(x.dtype)(0))
    return padded


def divide_out_2_and_3(stride: int) -> int:
    """Divide `stride` by 2 and 3 as often as possible and return the rest."""
    for factor in (2, 3):
        while stride % factor == 0:
            stride //= factor
    return stride
