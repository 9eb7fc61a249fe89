"""Windows of conv_transpose: the part of the full transposed convolution that it returns, and symmetric pads."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, is_symbolic

__all__ = ["build_symmetric_crop", "compute_crop_window", "describe_crop", "has_explicit_window", "read_pads"]

_CropWindow = list[tuple[int, int]]
"Elements cropped before and after the full transposed convolution, by spatial axis; negative where added."


def _compute_kernel_extent(op: Operation, axis: int) -> int:
    """Return the extent that the dilated kernel covers on spatial `axis`."""
    dilation: int = get_const_value(op.dilations, [1] * (axis + 1))[axis]
    return (int(op.weight.shape[2 + axis]) - 1) * dilation + 1


def read_pads(op: Operation) -> _CropWindow:
    """Return the pads of the op in pairs; zeros unless pad_type is custom, as pads are ignored otherwise."""
    axes = range(op.x.rank - 2)
    if get_const_value(op.pad_type, "valid") != "custom":
        return [(0, 0) for _ in axes]
    flat = get_const_value(op.pad, [0] * 2 * len(axes))
    return [(flat[2 * axis], flat[2 * axis + 1]) for axis in axes]


def compute_crop_window(op: Operation) -> _CropWindow | str:
    """Compute the window of the full transposed convolution that is output, or return why it is not fixed numbers.

    An `output_shape` is read as MIL's reference does. It sets the lengths; the window begins at the pads, and for
    `same` in the middle, with the odd element at the end (`same_lower`: at the beginning).
    """
    kind = get_const_value(op.pad_type, "valid")
    if op.output_shape is not None and op.output_shape.val is None:
        return "output_shape is not constant"
    lengths = get_const_value(op.output_shape)
    window: _CropWindow = []
    for axis, (before, after) in enumerate(read_pads(op)):
        stride = get_const_value(op.strides, [1] * (axis + 1))[axis]
        extent = op.x.shape[2 + axis]
        if lengths is not None and is_symbolic(extent):
            return "output_shape is given for an input of symbolic size"
        full = None if is_symbolic(extent) else (int(extent) - 1) * stride + _compute_kernel_extent(op, axis)
        if kind in ("same", "same_lower"):
            if full is not None and lengths is not None:
                rest = full - lengths[2 + axis]
            else:  # the length is extent * stride, and the extent cancels out
                rest = _compute_kernel_extent(op, axis) - stride
            small = max(rest, 0) // 2  # nothing to crop in front where the kernel is shorter than the stride
            large = rest - small
            before, after = (large, small) if kind == "same_lower" else (small, large)
        elif lengths is not None and full is not None:
            after = full - before - lengths[2 + axis]
        window.append((before, after))
    return window


def has_explicit_window(op: Operation) -> bool:
    """Return whether the pads alone define the window: they are explicit, and an `output_shape` agrees with them."""
    return get_const_value(op.pad_type, "valid") in ("custom", "valid") and compute_crop_window(op) == read_pads(op)


def build_symmetric_crop(mb: RewriteBuilder, op: Operation, window: _CropWindow) -> Var:
    """Build `op` with the smaller pad of each axis on both sides, then slice off what the larger pad cropped."""
    pads = [min(pair) for pair in window]
    changes: dict[str, Any] = {"pad_type": "custom", "pad": [pad for pad in pads for _ in range(2)]}
    if op.output_shape is not None:
        lengths = get_const_value(op.output_shape)
        longer = [sum(pair) - 2 * pad for pair, pad in zip(window, pads)]
        changes["output_shape"] = lengths[:2] + [length + more for length, more in zip(lengths[2:], longer)]
    y = rebuild_op(mb, op, **changes)
    starts = [0, 0, *(before - pad for (before, _), pad in zip(window, pads))]
    ends = [0, 0, *(pad - after for (_, after), pad in zip(window, pads))]
    if not any(starts) and not any(ends):
        return y
    cropped: Var = mb.slice_by_index(x=y, begin=starts, end=ends, end_mask=[end == 0 for end in ends])
    return cropped


def describe_crop(window: _CropWindow) -> str:
    """Describe what is computed and discarded."""
    pads = ", ".join(str(min(pair)) for pair in window)
    crop = sum(max(pair) - min(pair) for pair in window)
    return f"pads {pads} on both sides" + (f"; {crop} more computed and sliced off" if crop else "; nothing to slice "
                                                                                                 "off")
