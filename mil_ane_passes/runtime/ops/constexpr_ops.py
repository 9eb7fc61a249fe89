"""Compressed constants, decompressed when they are used.

Packed data is read as numpy arrays, because torch lacks the packed dtypes. Scales and zero points are applied in the
computing dtype, in the order of coremltools' `decompress` functions. Large weights are decompressed some rows at a
time, because intermediate results need several times the memory of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...ir.constants import unpack_codes
from ..registry import register_kernel

Array = np.ndarray[Any, Any]

_ELEMENTS_AT_ONCE = 1 << 20
"Elements that are decompressed at once: few enough for the cache. A multiple of 8 cuts packed bits at byte boundaries."


@register_kernel("constexpr_cast")
def constexpr_cast(op: Any, ins: Any) -> torch.Tensor:
    return ins["source_val"]


@register_kernel("constexpr_affine_dequantize")
def constexpr_affine_dequantize(op: Any, ins: Any) -> torch.Tensor:
    """Compute `scale * (data - zero_point)`, with vectors along `axis`."""
    data = _read_packed(ins, "quantized_data")
    shape = [1] * data.dim()
    shape[ins.value("axis")] = -1
    zero_point, scale = (_reshape_parameter(ins[name].to(ins.compute), shape) for name in ("zero_point", "scale"))
    return _compute_by_rows(ins, lambda data, zero_point, scale: (data.to(ins.compute) - zero_point) * scale,
                            data, zero_point, scale)


def _reshape_parameter(parameter: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return parameter.reshape(shape if parameter.numel() > 1 else [1] * len(shape))


def _read_packed(ins: Any, name: str) -> torch.Tensor:
    """Return packed or quantized data; if it is stored in bytes, without conversion."""
    stored = ins.constant(name)
    if stored is None or stored.dtype.kind not in "iu" or stored.dtype.itemsize > 1:
        return torch.as_tensor(ins[name])
    return torch.from_numpy(np.array(stored, np.dtype(stored.dtype.str)))  # drops the dtype's mark of sub-byte types


def _compute_by_rows(
    ins: Any, compute: Callable[..., torch.Tensor], data: torch.Tensor, *parameters: torch.Tensor
) -> torch.Tensor:
    """Compute a weight from `data` and the parameters of its blocks, some rows at a time.

    Parameters have the rank of `data`. Along each axis they have one entry for each block of elements, or one for all.
    The number of rows of the weight is that of `data`, or a multiple of it.
    """
    count = data.shape[0] if data.dim() else 1
    step = math.lcm(*(count // each.shape[0] for each in parameters if each.dim() and each.shape[0] > 1))
    rows = max(1, _ELEMENTS_AT_ONCE * count // max(1, data.numel()) // step) * step
    if rows >= count:
        return compute(data, *parameters)
    found = torch.empty(0)
    for start in range(0, count, rows):
        part = compute(data[start : start + rows], *(_cut_rows(each, start, rows, count) for each in parameters))
        if not start:
            found = ins.allocate((part.shape[0] // rows * count, *part.shape[1:]), part.dtype)
        place = found.shape[0] // count * start
        found[place : place + part.shape[0]] = part
    return found


def _cut_rows(parameter: torch.Tensor, start: int, rows: int, count: int) -> torch.Tensor:
    """Cut out the entries for `rows` of `count` rows of data."""
    if parameter.shape[0] == 1:
        return parameter
    per_entry = count // parameter.shape[0]
    return parameter[start // per_entry : (start + rows) // per_entry]


@register_kernel("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(op: Any, ins: Any) -> torch.Tensor:
    return _dequantize_blocks(_read_packed(ins, "data"), ins)


@register_kernel("constexpr_lut_to_dense")
def constexpr_lut_to_dense(op: Any, ins: Any) -> torch.Tensor:
    indices, lut = _read_packed(ins, "indices"), ins["lut"]
    if not ins.accepts("shape"):
        return _look_up_entries(ins, indices, ins.value("vector_axis"))
    # Before iOS18 indices are packed bits, least significant first.
    shape = ins.values("shape")
    bits = int(lut.numel() - 1).bit_length() or 1
    found = ins.allocate([math.prod(shape)], lut.dtype)
    for start, numbers in _iterate_unpacked(indices.numpy(), bits, found.numel()):
        torch.take(lut, torch.from_numpy(numbers), out=found[start : start + numbers.size])
    return found.reshape(shape)


@register_kernel("constexpr_sparse_to_dense")
def constexpr_sparse_to_dense(op: Any, ins: Any) -> torch.Tensor:
    mask, data = _read_packed(ins, "mask"), ins["nonzero_data"]
    if not ins.accepts("shape"):
        return _scatter_nonzero(data, mask)
    shape, at = ins.values("shape"), 0
    found = torch.zeros(math.prod(shape), dtype=data.dtype)
    for start, bits in _iterate_unpacked(mask.numpy(), 1, found.numel()):
        places = start + torch.from_numpy(np.flatnonzero(bits))
        found[places] = data[at : at + places.numel()]
        at += places.numel()
    if at != data.numel():
        raise ValueError(f"the mask selects {at} elements, there are {data.numel()}")
    return found.reshape(shape)


@register_kernel("constexpr_lut_to_sparse")
def constexpr_lut_to_sparse(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask, axis = ins["indices_mask"], ins.value("vector_axis")
    dense = _look_up_entries(ins, _scatter_nonzero(ins["indices_nonzero_data"], mask), axis)
    if axis is not None:
        mask = mask.repeat_interleave(ins["lut"].shape[-1], axis)
    return mask, dense[mask != 0]


@register_kernel("constexpr_sparse_blockwise_shift_scale")
def constexpr_sparse_blockwise_shift_scale(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask = ins["data_mask"]
    return mask, _dequantize_blocks(_scatter_nonzero(ins["nonzero_data"], mask), ins)[mask != 0]


def _scatter_nonzero(data: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Place the non-zero data at the positions where the mask is set, with zeros elsewhere."""
    dense = torch.zeros(mask.shape, dtype=data.dtype)
    dense[mask != 0] = data
    return dense


def _dequantize_blocks(data: torch.Tensor, ins: Any) -> torch.Tensor:
    """Compute `scale * (data - offset)`, with one scale and offset for each block."""
    def dequantize(data: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        found = data.to(ins.compute, copy=True)
        if offset is not None:
            found.reshape(_split_axes(offset, data.shape)).sub_(_align_blocks(offset))
        found.reshape(_split_axes(scale, data.shape)).mul_(_align_blocks(scale))
        return found

    offset = ins.get("offset")
    return _compute_by_rows(ins, dequantize, data, ins["scale"], *([] if offset is None else [offset.to(ins.compute)]))


def _split_axes(parameter: torch.Tensor, shape: torch.Size) -> list[int]:
    """Return `shape` with each axis split in two: the number of blocks, and the number of elements of a block."""
    return [size for count, extent in zip(parameter.shape, shape) for size in (count, extent // count)]


def _align_blocks(parameter: torch.Tensor) -> torch.Tensor:
    """Reshape a parameter to broadcast with the shape of `_split_axes`: one entry for all elements of a block."""
    return parameter.reshape([size for count in parameter.shape for size in (count, 1)])


def _repeat_blocks(parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    for axis, extent in enumerate(shape):
        if parameter.shape[axis] != extent:
            parameter = parameter.repeat_interleave(extent // parameter.shape[axis], axis)
    return parameter


def _look_up_entries(ins: Any, indices: torch.Tensor, vector_axis: int | None) -> torch.Tensor:
    """Replace each index by its entry in the table of its block; vectors are laid out along `vector_axis`."""
    lut = ins["lut"]
    palettes, vector = lut.shape[-2:]
    entries = lut.reshape(-1, vector)
    axis = (vector_axis or 0) % indices.dim()

    def look_up(indices: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        found = entries[_repeat_blocks(tables, indices.shape) * palettes + indices.long()]
        return found.squeeze(-1) if vector == 1 else found.movedim(-1, axis + 1).flatten(axis, axis + 1)

    tables = torch.arange(math.prod(lut.shape[:-2])).reshape(lut.shape[:-2])
    return _compute_by_rows(ins, look_up, indices, tables)


def _iterate_unpacked(packed: Array, bits: int, count: int) -> Iterator[tuple[int, Array]]:
    """Yield `count` unpacked numbers in pieces, each with the index of its first number."""
    for start in range(0, count, _ELEMENTS_AT_ONCE):
        size = min(_ELEMENTS_AT_ONCE, count - start)
        piece = packed[start * bits // 8 : -(-(start + size) * bits // 8)].astype(np.uint8)
        yield start, unpack_codes(piece, bits)[:size].astype(np.int64)
