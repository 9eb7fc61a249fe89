"""Compressed constants, decompressed when they are used.

The work is done on numpy arrays: packed data is not arithmetic. Scales and zero points are applied in the computing
dtype, in the order coremltools' `decompress` functions apply them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..registry import kernel

Array = np.ndarray[Any, Any]


@kernel("constexpr_cast")
def constexpr_cast(op: Any, ins: Any) -> torch.Tensor:
    return ins["source_val"]


@kernel("constexpr_affine_dequantize")
def constexpr_affine_dequantize(op: Any, ins: Any) -> torch.Tensor:
    """`scale * (data - zero_point)`, vectors along `axis`."""
    data = ins["quantized_data"].to(ins.compute)
    shape = [1] * data.dim()
    shape[ins.value("axis")] = -1
    zero_point, scale = (ins[name].to(ins.compute) for name in ("zero_point", "scale"))
    return (data - _viewed(zero_point, shape)) * _viewed(scale, shape)


def _viewed(parameter: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return parameter.reshape(shape) if parameter.numel() > 1 else parameter.reshape(())


@kernel("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(op: Any, ins: Any) -> torch.Tensor:
    return _shift_scale(ins["data"], ins)


@kernel("constexpr_lut_to_dense")
def constexpr_lut_to_dense(op: Any, ins: Any) -> torch.Tensor:
    indices, lut = ins["indices"], ins["lut"]
    if not ins.accepts("shape"):
        return _looked_up(indices, lut, ins.value("vector_axis"))
    # Before iOS18 indices are packed bits, least significant first.
    shape = ins.values("shape")
    bits = int(lut.numel() - 1).bit_length() or 1
    flat = _unpacked(indices.numpy(), bits, int(np.prod(shape)))
    return lut.reshape(-1)[torch.from_numpy(flat)].reshape(shape)


@kernel("constexpr_sparse_to_dense")
def constexpr_sparse_to_dense(op: Any, ins: Any) -> torch.Tensor:
    mask, data = ins["mask"], ins["nonzero_data"]
    if ins.accepts("shape"):
        shape = ins.values("shape")
        bits = _unpacked(mask.numpy(), 1, int(np.prod(shape)))
        mask = torch.from_numpy(bits).reshape(shape)
    return _spread(data, mask)


@kernel("constexpr_lut_to_sparse")
def constexpr_lut_to_sparse(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask, axis = ins["indices_mask"], ins.value("vector_axis")
    dense = _looked_up(_spread(ins["indices_nonzero_data"], mask), ins["lut"], axis)
    if axis is not None:
        mask = mask.repeat_interleave(ins["lut"].shape[-1], axis)
    return mask, dense[mask != 0]


@kernel("constexpr_sparse_blockwise_shift_scale")
def constexpr_sparse_blockwise_shift_scale(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask = ins["data_mask"]
    return mask, _shift_scale(_spread(ins["nonzero_data"], mask), ins)[mask != 0]


def _spread(data: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The non-zero data at the places the mask marks, zeros elsewhere."""
    dense = torch.zeros(mask.shape, dtype=data.dtype)
    dense[mask != 0] = data
    return dense


def _shift_scale(data: torch.Tensor, ins: Any) -> torch.Tensor:
    """`scale * (data - offset)`, each scale and offset for one block."""
    data, scale, offset = data.to(ins.compute), ins["scale"], ins.get("offset")
    if offset is not None:
        data = data - _blown_up(offset.to(ins.compute), data.shape)
    return _blown_up(scale, data.shape) * data


def _blown_up(parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    for axis, extent in enumerate(shape):
        if parameter.shape[axis] != extent:
            parameter = parameter.repeat_interleave(extent // parameter.shape[axis], axis)
    return parameter


def _looked_up(indices: torch.Tensor, lut: torch.Tensor, vector_axis: int | None) -> torch.Tensor:
    """Each index replaced by its entry in the table of its block; vectors are laid out along `vector_axis`."""
    palettes, vector = lut.shape[-2:]
    places = indices.long()
    tables = torch.arange(int(np.prod(lut.shape[:-2]))).reshape(lut.shape[:-2])
    rows = _blown_up(tables, indices.shape) * palettes + places
    entries = lut.reshape(-1, vector)[rows]
    if vector == 1:
        return entries.squeeze(-1)
    axis = (vector_axis or 0) % indices.dim()
    return entries.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _unpacked(packed: Array, bits: int, count: int) -> Array:
    """`count` unsigned numbers of `bits` bits each, as int64."""
    stream = np.unpackbits(packed.astype(np.uint8), bitorder="little")[: count * bits].reshape(count, bits)
    return np.asarray(stream.astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64)))
