"""Gathers and scatters. A scatter gathers the positions of the elements it changes, then changes them in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...utils.errors import InputError
from ..registry import register_kernel


def _make_positions(like: torch.Tensor) -> torch.Tensor:
    """Number the elements of `like` row by row, in its shape."""
    return torch.arange(like.numel()).reshape(like.shape)


def _apply_scatter(data: torch.Tensor, places: torch.Tensor, updates: torch.Tensor, mode: str) -> torch.Tensor:
    """Apply `updates` to `data` at the flat positions `places`, one after the other.

    The last of several updates of one position wins.
    """
    flat = data.clone(memory_format=torch.contiguous_format).reshape(-1).numpy()
    index, values = places.reshape(-1).numpy(), updates.broadcast_to(places.shape).reshape(-1).numpy()
    if mode == "update":
        flat[index] = values
    elif mode == "div" and flat.dtype.kind == "i":
        quotients = flat.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            np.divide.at(quotients, index, values)
        # Division by zero gives 0, as in `real_div`. The only quotient that int32 cannot hold wraps.
        divided = np.where(np.isfinite(quotients), quotients, 0.0).astype(np.int64)
        for place, quotient in _divide_lowest_integer(flat, index, values).items():
            divided[place] = quotient
        flat[...] = divided
    else:
        with np.errstate(all="ignore"):  # overflow and division by zero give infinities and NaN, without a warning
            _UFUNCS[mode].at(flat, index, values)
    return torch.from_numpy(flat).reshape(data.shape)


def _divide_lowest_integer(flat: Any, index: Any, values: Any) -> dict[int, int]:
    """Return the successive quotients of elements with the smallest integer of their dtype, by position.

    The smallest integer divided by -1 wraps to itself.
    """
    lowest = int(np.iinfo(flat.dtype).min)
    meant = flat[index] == lowest
    found: dict[int, int] = {}
    for place, divisor in zip(index[meant].tolist(), values[meant].tolist()):
        old = found.get(place, lowest)
        size = abs(old) // abs(divisor) if divisor else 0
        found[place] = size if (old < 0) == (divisor < 0) and size != -lowest else -size
    return found


_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}


def _wrap_indices(indices: torch.Tensor, extent: int, ins: Any) -> torch.Tensor:
    """Return indices with negative ones counted from the end. Raises InputError for an index out of range.

    If an op does not validate its indices, the result for an index out of range is undefined and cannot be compared, so
    it is an error here. Since iOS17 negative indices are undefined, too, unless they are validated; here they count
    from the end, as in coremltools' inference.
    """
    indices = indices.long()
    strict = ins.accepts("validate_indices") and bool(ins.value("validate_indices"))
    low, high = 0 if strict else -extent, extent - 1
    if indices.numel() and (int(indices.min()) < low or int(indices.max()) > high):
        found = f"{int(indices.min())}..{int(indices.max())}"
        raise InputError(f"{ins.op.op_type} '{ins.op.name}': found indices {found}, expected {low}..{high}")
    return torch.where(indices < 0, indices + extent, indices)


def _make_batch_grid(shape: tuple[int, ...], batch_dims: int) -> list[torch.Tensor]:
    """Make index tensors that pair each of the leading `batch_dims` axes with itself, broadcast to the rank of `shape`.
    """
    return [
        torch.arange(shape[axis]).reshape([-1 if each == axis else 1 for each in range(len(shape))])
        for axis in range(batch_dims)
    ]


def _gather_on_axis(x: torch.Tensor, indices: torch.Tensor, axis: int, batch_dims: int, ins: Any) -> torch.Tensor:
    axis %= x.dim()
    indices = _wrap_indices(indices, x.shape[axis], ins)
    if batch_dims == 0:
        picked = torch.index_select(x, axis, indices.reshape(-1))
        return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))
    grid = _make_batch_grid(tuple(indices.shape), batch_dims)
    places = (*grid, indices)
    picked = x.movedim(axis, batch_dims)[places]
    # The axes between the batch axes and `axis` are now after the axes of the indices: move them back.
    between = axis - batch_dims
    moved = list(range(indices.dim(), indices.dim() + between))
    rest = [each for each in range(batch_dims, picked.dim()) if each not in moved]
    return picked.permute(*range(batch_dims), *moved, *rest)


def _gather_nd(x: torch.Tensor, indices: torch.Tensor, batch_dims: int, ins: Any) -> torch.Tensor:
    grid = _make_batch_grid(tuple(indices.shape[:-1]), batch_dims)
    columns = (_wrap_indices(indices[..., each], x.shape[batch_dims + each], ins) for each in range(indices.shape[-1]))
    places = (*grid, *columns)
    return x[places]


def _gather_along_axis(x: torch.Tensor, indices: torch.Tensor, axis: int, ins: Any) -> torch.Tensor:
    return torch.take_along_dim(x, _wrap_indices(indices, x.shape[axis], ins), axis)


@register_kernel("gather")
def gather(op: Any, ins: Any) -> torch.Tensor:
    axis, batch_dims = ins.value("axis"), ins.value("batch_dims") if ins.accepts("batch_dims") else 0
    table = ins.constant("x")
    if table is not None and table.ndim and axis == 0 and batch_dims == 0:
        # Only the requested rows of a mapped table are read and converted.
        indices = _wrap_indices(ins["indices"], table.shape[0], ins)
        rows = ins.machine.precision.constant(table[indices.reshape(-1).numpy()])
        return rows.reshape((*indices.shape, *table.shape[1:]))
    return _gather_on_axis(ins["x"], ins["indices"], axis, batch_dims, ins)


@register_kernel("gather_along_axis")
def gather_along_axis(op: Any, ins: Any) -> torch.Tensor:
    return _gather_along_axis(ins["x"], ins["indices"], ins.value("axis"), ins)


@register_kernel("gather_nd")
def gather_nd(op: Any, ins: Any) -> torch.Tensor:
    batch_dims = ins.value("batch_dims") if ins.accepts("batch_dims") else 0
    return _gather_nd(ins["x"], ins["indices"], batch_dims, ins)


@register_kernel("scatter")
def scatter(op: Any, ins: Any) -> torch.Tensor:
    data = ins["data"]
    places = _gather_on_axis(_make_positions(data), ins["indices"], ins.value("axis"), 0, ins)
    return _apply_scatter(data, places, ins["updates"], ins.value("mode"))


@register_kernel("scatter_along_axis")
def scatter_along_axis(op: Any, ins: Any) -> torch.Tensor:
    data = ins["data"]
    places = _gather_along_axis(_make_positions(data), ins["indices"], ins.value("axis"), ins)
    return _apply_scatter(data, places, ins["updates"], ins.value("mode"))


@register_kernel("scatter_nd")
def scatter_nd(op: Any, ins: Any) -> torch.Tensor:
    data = ins["data"]
    return _apply_scatter(
        data, _gather_nd(_make_positions(data), ins["indices"], 0, ins), ins["updates"], ins.value("mode")
    )
