"""Compressed constants, decompressed when they are used.

The work is done on numpy arrays: packed data is not arithmetic. Scales and zero points are applied in the computing
dtype, in the order coremltools' `decompress` functions apply them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..registry import register_kernel

Array = np.ndarray[Any, Any]


@register_kernel("constexpr_cast")
def constexpr_cast(op: Any, ins: Any) -> torch.Tensor:
    return ins["source_val"]


@register_kernel("constexpr_affine_dequantize")
def constexpr_affine_dequantize(op: Any, ins: Any) -> torch.Tensor:
    """Compute `scale * (data - zero_point)`, with vectors along `axis`."""
    data = ins["quantized_data"].to(ins.compute)
    shape = [1] * data.dim()
    shape[ins.value("axis")] = -1
    zero_point, scale = (ins[name].to(ins.compute) for name in ("zero_point", "scale"))
    return (data - _reshape_parameter(zero_point, shape)) * _reshape_parameter(scale, shape)


def _reshape_parameter(parameter: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return parameter.reshape(shape) if parameter.numel() > 1 else parameter.reshape(())


@register_kernel("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(op: Any, ins: Any) -> torch.Tensor:
    return _dequantize_blocks(ins["data"], ins)


@register_kernel("constexpr_lut_to_dense")
def constexpr_lut_to_dense(op: Any, ins: Any) -> torch.Tensor:
    indices, lut = ins["indices"], ins["lut"]
    if not ins.accepts("shape"):
        return _look_up_entries(indices, lut, ins.value("vector_axis"))
    # Before iOS18 indices are packed bits, least significant first.
    shape = ins.values("shape")
    bits = int(lut.numel() - 1).bit_length() or 1
    flat = _unpack_bits(indices.numpy(), bits, int(np.prod(shape)))
    return lut.reshape(-1)[torch.from_numpy(flat)].reshape(shape)


@register_kernel("constexpr_sparse_to_dense")
def constexpr_sparse_to_dense(op: Any, ins: Any) -> torch.Tensor:
    mask, data = ins["mask"], ins["nonzero_data"]
    if ins.accepts("shape"):
        shape = ins.values("shape")
        bits = _unpack_bits(mask.numpy(), 1, int(np.prod(shape)))
        mask = torch.from_numpy(bits).reshape(shape)
    return _scatter_nonzero(data, mask)


@register_kernel("constexpr_lut_to_sparse")
def constexpr_lut_to_sparse(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask, axis = ins["indices_mask"], ins.value("vector_axis")
    dense = _look_up_entries(_scatter_nonzero(ins["indices_nonzero_data"], mask), ins["lut"], axis)
    if axis is not None:
        mask = mask.repeat_interleave(ins["lut"].shape[-1], axis)
    return mask, dense[mask != 0]


@register_kernel("constexpr_sparse_blockwise_shift_scale")
def constexpr_sparse_blockwise_shift_scale(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask = ins["data_mask"]
    return mask, _dequantize_blocks(_scatter_nonzero(ins["nonzero_data"], mask), ins)[mask != 0]


def _scatter_nonzero(data: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Place the non-zero data where the mask is set, with zeros elsewhere."""
    dense = torch.zeros(mask.shape, dtype=data.dtype)
    dense[mask != 0] = data
    return dense


def _dequantize_blocks(data: torch.Tensor, ins: Any) -> torch.Tensor:
    """Compute `scale * (data - offset)`, with one scale and offset for each block."""
    data, scale, offset = data.to(ins.compute), ins["scale"], ins.get("offset")
    if offset is not None:
        data = data - _repeat_blocks(offset.to(ins.compute), data.shape)
    return _repeat_blocks(scale, data.shape) * data


def _repeat_blocks(parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    for axis, extent in enumerate(shape):
        if parameter.shape[axis] != extent:
            parameter = parameter.repeat_interleave(extent // parameter.shape[axis], axis)
    return parameter


def _look_up_entries(indices: torch.Tensor, lut: torch.Tensor, vector_axis: int | None) -> torch.Tensor:
    """Replace each index by its entry in the table of its block; vectors are laid out along `vector_axis`."""
    palettes, vector = lut.shape[-2:]
    places = indices.long()
    tables = torch.arange(int(np.prod(lut.shape[:-2]))).reshape(lut.shape[:-2])
    rows = _repeat_blocks(tables, indices.shape) * palettes + places
    entries = lut.reshape(-1, vector)[rows]
    if vector == 1:
        return entries.squeeze(-1)
    axis = (vector_axis or 0) % indices.dim()
    return entries.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _unpack_bits(packed: Array, bits: int, count: int) -> Array:
    """Unpack `count` unsigned numbers of `bits` bits each, 8 at most, to int64."""
    stored = packed.astype(np.uint8)
    if bits == 8:
        return stored[:count].astype(np.int64)
    stream = np.unpackbits(stored, bitorder="little")[: count * bits].reshape(count, bits)
    numbers = stream[:, 0].copy()
    for place in range(1, bits):
        numbers |= stream[:, place] << place
    return numbers.astype(np.int64)
