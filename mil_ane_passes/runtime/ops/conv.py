"""Convolutions. A 1-D convolution and the same one lifted to 2-D run the same kernel: see `_drop_trivial_axes`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...ir.query import is_const
from ..numeric import canonicalize_layout, make_scalar
from ..registry import register_kernel

__all__ = ["add_bias", "compute_conv", "compute_conv_transpose", "compute_pads", "find_conv_transpose_window"]

_CONV = (functional.conv1d, functional.conv2d, functional.conv3d)
_BIAS_SHAPES = {rank: (1, -1, *(1,) * (rank - 2)) for rank in (3, 4, 5)}
_MIN_WEIGHT_RATIO = 32
"""The least ratio of the elements of a weight to those of one input of the batch at which `_multiply_and_add_taps` is
used. Measured on 2 cores: 3 to 4 times as fast as torch at a ratio of 256, 1.6 to 1.9 times at 64, no faster at 16."""
_CONV_TRANSPOSE = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


@register_kernel("conv")
def conv(op: Any, ins: Any) -> torch.Tensor:
    return _add_op_bias(ins, compute_conv(ins, ins["weight"]))


@register_kernel("conv_transpose")
def conv_transpose(op: Any, ins: Any) -> torch.Tensor:
    return _add_op_bias(ins, compute_conv_transpose(ins))


@register_kernel("conv_quantized")
def conv_quantized(op: Any, ins: Any) -> torch.Tensor:
    """Convolve with `W_quantized * scale + bias`, with scale and bias per output channel or one for all."""
    weight = ins["weight"].to(ins.compute)
    shape = (-1,) + (1,) * (weight.dim() - 1)
    weight = weight * ins["quant_scale"].reshape(-1).view(shape) + ins["quant_bias"].reshape(-1).view(shape)
    bias = ins.get("bias")
    return add_bias(compute_conv(ins, weight), None if bias is None else bias.to(ins.compute))


def split_same_padding(excess: int, lower: bool) -> tuple[int, int]:
    """Split a padding of `excess` elements into (before, after); the odd one goes after, or before for `same_lower`."""
    excess = max(excess, 0)
    small, large = excess // 2, excess - excess // 2
    return (large, small) if lower else (small, large)


def compute_pads(ins: Any, extents: list[int], kernel_extents: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """Compute the padding (before, after) for each spatial axis of a convolution or a pooling."""
    pad_type, pad = ins.value("pad_type"), ins.values("pad")
    if pad_type == "custom":
        return [(pad[2 * axis], pad[2 * axis + 1]) for axis in range(len(extents))]
    if pad_type in ("same", "same_lower"):
        return [
            split_same_padding((-(-extent // stride) - 1) * stride + reach - extent, pad_type == "same_lower")
            for extent, reach, stride in zip(extents, kernel_extents, strides)
        ]
    return [(0, 0)] * len(extents)


def compute_conv(ins: Any, weight: torch.Tensor) -> torch.Tensor:
    """Compute the convolution without its bias."""
    x = ins["x"]
    rank = x.dim() - 2
    kept, pads, steps = ins.memo((x.shape, weight.shape), lambda: _plan_conv(ins, x.shape, weight.shape))
    is_whole = len(kept) == rank
    if not is_whole:
        x, weight = _drop_trivial_axes(x, kept), _drop_trivial_axes(weight, kept)
    if pads:
        # Padding is always explicit, so that padded zeros meet infinite weights in the same way for all pads.
        x = torch.constant_pad_nd(x, pads)
    y = _CONV[len(kept) - 1](canonicalize_layout(x), canonicalize_layout(weight), None, *steps)
    return y if is_whole else _restore_axes(y, rank, kept)


def _plan_conv(
    ins: Any, shape: torch.Size, weight_shape: torch.Size
) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Return the spatial axes to convolve, their pads in torch's order, and the further arguments of the convolution.

    There are no pads where all are 0; the further arguments are strides, padding (none), dilations and groups.
    """
    strides, dilations = ins.values("strides"), ins.values("dilations")
    reach = [(size - 1) * step + 1 for size, step in zip(weight_shape[2:], dilations)]
    pads = compute_pads(ins, list(shape[2:]), reach, strides)
    rank = len(shape) - 2
    trivial = [shape[2 + axis] == 1 == weight_shape[2 + axis] and pads[axis] == (0, 0) for axis in range(rank)]
    kept = _find_kept_axes(trivial)
    stride, dilation = (tuple(_select_steps(each, trivial, kept)) for each in (strides, dilations))
    return kept, _flatten_pads([pads[axis] for axis in kept]), (stride, 0, dilation, ins.value("groups"))


def compute_conv_transpose(ins: Any) -> torch.Tensor:
    """Compute the transposed convolution without its bias: in full, then cropped or extended with zeros."""
    x, weight = ins["x"], ins["weight"]
    strides, dilations = ins.values("strides"), ins.values("dilations")
    rank = x.dim() - 2
    full = [
        (x.shape[2 + axis] - 1) * strides[axis] + (weight.shape[2 + axis] - 1) * dilations[axis] + 1
        for axis in range(rank)
    ]
    same = [x.shape[2 + axis] * strides[axis] for axis in range(rank)]
    starts, lengths = find_conv_transpose_window(ins, full, same)
    trivial = [
        x.shape[2 + axis] == 1 == weight.shape[2 + axis] and starts[axis] == 0 and lengths[axis] == 1
        for axis in range(rank)
    ]
    kept = _find_kept_axes(trivial)
    y = _convolve_transposed(
        canonicalize_layout(_drop_trivial_axes(x, kept)),
        canonicalize_layout(_drop_trivial_axes(weight, kept)),
        _select_steps(strides, trivial, kept),
        _select_steps(dilations, trivial, kept),
        ins.value("groups"),
    )
    # A negative amount crops, a positive one extends with zeros.
    crops = [(-starts[axis], starts[axis] + lengths[axis] - full[axis]) for axis in kept]
    return _restore_axes(_pad_spatial(y, crops), rank, kept)


def _convolve_transposed(
    x: torch.Tensor, weight: torch.Tensor, strides: list[int], dilations: list[int], groups: int
) -> torch.Tensor:
    """Compute the full transposed convolution over all spatial axes of `x`.

    At float64, torch multiplies each element of a batch with the weight, and reads a large weight from memory each
    time. One product of the whole batch is then faster, unless the results of the taps, which are added afterwards,
    are large.
    """
    if (x.dtype == torch.float64 and x.dim() == 3 and x.shape[0] > 1 and groups == 1
            and weight.numel() >= _MIN_WEIGHT_RATIO * x.shape[1] * x.shape[2] > 0):
        return _multiply_and_add_taps(x, weight, strides[0], dilations[0])
    return _CONV_TRANSPOSE[x.dim() - 3](x, weight, None, stride=strides, dilation=dilations, groups=groups)


def _multiply_and_add_taps(x: torch.Tensor, weight: torch.Tensor, stride: int, dilation: int) -> torch.Tensor:
    """Compute a transposed convolution of (batch, channels, length) with (channels, outputs, taps) as one product."""
    batch, channels, length = x.shape
    _, outputs, taps = weight.shape
    rows = x.transpose(1, 2).reshape(batch * length, channels) @ weight.reshape(channels, outputs * taps)
    parts = rows.reshape(batch, length, outputs, taps)
    reach = (length - 1) * stride + 1
    y = x.new_zeros(batch, outputs, reach + (taps - 1) * dilation)
    for tap in range(taps):
        start = tap * dilation
        y[:, :, start:start + reach:stride] += parts[..., tap].transpose(1, 2)
    return y


def find_conv_transpose_window(ins: Any, full: list[int], same: list[int]) -> tuple[list[int], list[int]]:
    """Return the first elements kept and the lengths, by spatial axis, of the full transposed convolution."""
    pad_type, pad, shape = ins.value("pad_type"), ins.values("pad"), ins.values("output_shape")
    rank = len(full)
    if pad_type == "custom":
        starts = [pad[2 * axis] for axis in range(rank)]
        lengths = [full[axis] - pad[2 * axis] - pad[2 * axis + 1] for axis in range(rank)]
        return starts, list(shape[2:]) if shape else lengths
    if pad_type in ("same", "same_lower"):
        lengths = list(shape[2:]) if shape else same
        starts = [split_same_padding(full[axis] - lengths[axis], pad_type == "same_lower")[0] for axis in range(rank)]
        return starts, lengths
    return [0] * rank, list(shape[2:]) if shape else full


def _pad_spatial(x: torch.Tensor, pads: list[tuple[int, int]]) -> torch.Tensor:
    """Pad the spatial axes of `x` with zeros; return `x` itself, not a copy, when no padding is needed."""
    flat = _flatten_pads(pads)
    return functional.pad(x, flat) if flat else x


def _flatten_pads(pads: list[tuple[int, int]]) -> list[int]:
    """Return the pads in torch's order, the last axis first; none where all are 0."""
    flat = [amount for pair in reversed(pads) for amount in pair]
    return flat if any(flat) else []


def _find_kept_axes(trivial: list[bool]) -> list[int]:
    """Return the spatial axes that are not trivial; if all are, the last axis, because a convolution needs one."""
    return [axis for axis, drop in enumerate(trivial) if not drop] or [len(trivial) - 1]


def _select_steps(steps: list[int], trivial: list[bool], kept: list[int]) -> list[int]:
    """Select the strides or dilations of the kept axes, 1 for a trivial axis.

    They have no effect on a trivial axis, but would select another algorithm.
    """
    return [1 if trivial[axis] else steps[axis] for axis in kept]


def _drop_trivial_axes(x: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """Remove the spatial axes on which input, kernel and output have extent 1 and nothing is padded.

    They do not change the sums, but a library may select another algorithm for the other rank and round differently.
    """
    if len(kept) == x.dim() - 2:
        return x
    return x.reshape(*x.shape[:2], *(x.shape[2 + axis] for axis in kept))


def _restore_axes(y: torch.Tensor, rank: int, kept: list[int]) -> torch.Tensor:
    if len(kept) == rank:
        return y
    extents = [1] * rank
    for axis, extent in zip(kept, y.shape[2:]):
        extents[axis] = extent
    return y.reshape(*y.shape[:2], *extents)


def add_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add the bias to `y` in place.

    This is always one addition: a missing bias gives the bits of a zero bias (-0 becomes +0).
    """
    return y.add_(_shape_bias(bias, y))


def _add_op_bias(ins: Any, y: torch.Tensor) -> torch.Tensor:
    """Add the bias of a convolution to `y` in place; a constant one is given its shape once.

    From iOS17 on, the bias may be computed.
    """
    if ins.var("bias") is None or is_const(ins.var("bias")):
        return y.add_(ins.memo("bias", lambda: _shape_bias(ins.get("bias"), y)))
    return add_bias(y, ins.get("bias"))


def _shape_bias(bias: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    return make_scalar(0.0, y.dtype) if bias is None else bias.reshape(_BIAS_SHAPES[y.dim()])
