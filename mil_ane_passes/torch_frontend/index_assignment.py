"""Assignment at indices, `x[:, idx] = v`: torch's index_put, in the op that fits the indices.

Constant indices with one value become a select with a constant mask, or a concat of slices; masks become a select;
single positions become a window. Other indices become `scatter_nd`, which is unsupported on the ANE.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from .lowering import broadcast_to, cast_to, get_dims, to_size_vector
from .slice_assignment import assign_at_positions, slice_axis, wrap_index

__all__ = ["assign_at_indices"]

_MAX_JOINED_SLICES = 16
"""The most indices that become a concat of slices; more of them become a scatter."""


def assign_at_indices(x: Var, indices: list[Var | None], values: Var, accumulate: bool) -> Var:
    """Return `x` after `x[indices] = values`, or `+=` when `accumulate`.

    `indices` are int or bool Vars for the leading axes; None selects a whole axis. `values` broadcasts to the shape
    that the index selects, as in torch.
    """
    values = cast_to(values, x.dtype)
    chosen = [(axis, index) for axis, index in _pair_indices_with_axes(indices)]
    if len(chosen) == 1 and chosen[0][1].dtype == types.bool:
        axis, mask = chosen[0]
        blended = _assign_by_mask(x, mask, axis, values, accumulate)
        if blended is not None:
            return blended
    chosen = [place for axis, index in chosen for place in _convert_mask_to_positions(axis, index)]
    axes = [axis for axis, _ in chosen]
    positions = [normalize_index(x, axis, index) for axis, index in chosen]
    shape = _broadcast_index_shape(positions)
    if all(size == 1 for size in shape) and not accumulate:
        return _assign_single_position(x, axes, positions, values, len(shape))
    if not accumulate or x.dtype != types.bool:
        known = _assign_at_known_indices(x, axes, positions, values, accumulate, shape)
        if known is not None:
            return known
    return _assign_by_scatter(x, axes, positions, values, accumulate)


def normalize_index(x: Var, axis: int, index: Var) -> Var:
    """Count an index tensor from the front of its axis, as int32; a const where it and the size are constant."""
    size = x.shape[axis]
    if index.val is not None and isinstance(size, int | np.integer):
        return mb.const(val=(np.asarray(index.val) % int(size)).astype(np.int32))
    if index.val is not None and (np.asarray(index.val) >= 0).all():
        return mb.const(val=np.asarray(index.val).astype(np.int32))
    return wrap_index(cast_to(index, types.int32), get_dims(x)[axis])


def _pair_indices_with_axes(indices: list[Var | None]) -> list[tuple[int, Var]]:
    """Pair each index with its first axis: a mask of rank r covers r axes."""
    placed, axis = [], 0
    for index in indices:
        if index is not None:
            placed.append((axis, index))
        axis += index.rank if index is not None and index.dtype == types.bool else 1
    return placed


def _convert_mask_to_positions(axis: int, index: Var) -> list[tuple[int, Var]]:
    """Convert a mask to the positions where it is true, one vector for each axis; other indices are unchanged."""
    if index.dtype != types.bool:
        return [(axis, index)]
    if index.val is not None:
        return [(axis + place, mb.const(val=where.astype(np.int32)))
                for place, where in enumerate(np.nonzero(np.asarray(index.val)))]
    places = mb.non_zero(x=cast_to(index, types.int32))
    return [(axis + place, mb.squeeze(x=mb.slice_by_index(x=places, begin=[0, place], end=[0, place + 1],
                                                          end_mask=[True, False]), axes=[1]))
            for place in range(index.rank)]


def _assign_by_mask(x: Var, mask: Var, axis: int, values: Var, accumulate: bool) -> Var | None:
    """Assign at a mask by a select, where the values do not depend on the number of selected elements.

    Returns None where they may depend on it.
    """
    trailing = x.rank - axis - mask.rank
    if values.rank > trailing and values.shape[values.rank - trailing - 1] != 1:
        return None
    if values.rank > trailing:  # the axis of the selected elements has size 1: it represents all axes of the mask
        values = mb.reshape(
            x=values,
            shape=to_size_vector(
                [
                    *get_dims(values)[: values.rank - trailing - 1],
                    *[1] * mask.rank,
                    *get_dims(values)[values.rank - trailing :],
                ]
            ),
        )
    shape = to_size_vector([*[1] * axis, *get_dims(mask), *[1] * trailing])
    there = mb.reshape(x=mask, shape=shape) if axis or trailing else mask
    return _select_values(there, values, x, accumulate)


def _select_values(there: Var, values: Var, x: Var, accumulate: bool) -> Var:
    if accumulate:
        values = mb.add(x=x, y=values)
    return mb.select(cond=there, a=values, b=x)


def _broadcast_index_shape(positions: list[Var]) -> list[Any]:
    """Return the shape to which the indices broadcast, with None for a dynamic size."""
    rank = max(position.rank for position in positions)
    shape: list[Any] = [1] * rank
    for position in positions:
        for place, size in enumerate(reversed(position.shape), start=1):
            if size != 1:
                shape[-place] = int(size) if isinstance(size, int | np.integer) else None
    return shape


def _assign_single_position(x: Var, axes: list[int], positions: list[Var], values: Var, rank: int) -> Var:
    """Assign one position on each axis.

    The values' axes of the index (all of size 1) are removed, and the indexed axes have size 1.
    """
    lead, entire = _locate_index_axes(x, axes, rank)
    sizes = [1] * (len(entire) - values.rank) + get_dims(values)
    rest = [size for place, size in enumerate(sizes) if not lead <= place < lead + rank]
    others = iter(rest)
    update = mb.reshape(x=values, shape=to_size_vector([1 if axis in axes else next(others) for axis in range(x.rank)]))
    own = get_dims(x)
    update = broadcast_to(update, [1 if axis in axes else own[axis] for axis in range(x.rank)])
    places = {axis: _to_scalar(position) for axis, position in zip(axes, positions, strict=True)}
    return assign_at_positions(x, update, places)


def _to_scalar(position: Var) -> Any:
    if position.val is not None:
        return int(np.asarray(position.val).item())
    return mb.squeeze(x=position) if position.rank else position


def _locate_index_axes(x: Var, axes: list[int], rank: int) -> tuple[int, list[Any]]:
    """Return where the index's axes are in the shape of `x[indices]`, and that shape with None for them."""
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    lead = axes[0] if adjacent else 0
    rest: list[Any] = [size for axis, size in enumerate(get_dims(x)) if axis not in axes]
    return lead, [*rest[:lead], *[None] * rank, *rest[lead:]]


def _assign_at_known_indices(x: Var, axes: list[int], positions: list[Var], values: Var, accumulate: bool,
                             shape: list[Any]) -> Var | None:
    """Assign at compile-time constant indices: a select for a single value, a concat of slices for a few indices.

    Returns None for all others.
    """
    if any(position.val is None for position in positions) or None in shape:
        return None
    if not all(isinstance(x.shape[axis], int | np.integer) for axis in axes):
        return None
    places = [np.broadcast_to(position.val, shape).ravel() for position in positions]
    unique = len(set(zip(*places, strict=True))) == len(places[0])
    if accumulate and not unique:
        return None
    lead, entire = _locate_index_axes(x, axes, len(shape))
    sizes = [1] * (len(entire) - values.rank) + list(values.shape)
    if all(size == 1 for size in sizes[lead:lead + len(shape)]):
        return _assign_by_constant_mask(x, axes, places, values, accumulate, (lead, len(shape), len(entire)))
    if len(axes) == len(shape) == 1 and len(places[0]) <= _MAX_JOINED_SLICES and not accumulate:
        return _assign_by_concat(x, axes[0], places[0], values)
    return None


def _assign_by_constant_mask(x: Var, axes: list[int], places: list[Any], values: Var, accumulate: bool,
                             layout: tuple[int, int, int]) -> Var:
    lead, rank, entire = layout
    mask = np.zeros([int(x.shape[axis]) for axis in axes], dtype=bool)
    mask[tuple(places)] = True
    order = np.argsort(axes)
    mask = mask.transpose(order).reshape([int(x.shape[axis]) if axis in axes else 1 for axis in range(x.rank)])
    sizes = [1] * (entire - values.rank) + get_dims(values)
    others = iter(sizes[:lead] + sizes[lead + rank:])
    shaped = [1 if axis in axes else next(others) for axis in range(x.rank)]
    return _select_values(mb.const(val=mask), mb.reshape(x=values, shape=to_size_vector(shaped)), x, accumulate)


def _assign_by_concat(x: Var, axis: int, places: Any, values: Var) -> Var:
    """Concatenate slices of `x` and `values`, cut at the places.

    Of two values for one place the last counts, as on torch's CPU.
    """
    sizes = get_dims(x)
    sizes[axis] = len(places)
    values = broadcast_to(values, sizes)
    last = {int(place): number for number, place in enumerate(places)}
    parts, done = [], 0
    for place in sorted(last):
        if place > done:
            parts.append(slice_axis(x, axis, done, place))
        parts.append(slice_axis(values, axis, last[place], last[place] + 1))
        done = place + 1
    if done < int(x.shape[axis]):
        parts.append(slice_axis(x, axis, done, int(x.shape[axis])))
    return mb.concat(values=parts, axis=axis) if len(parts) > 1 else parts[0]


def _assign_by_scatter(x: Var, axes: list[int], positions: list[Var], values: Var, accumulate: bool) -> Var:
    """Move the indexed axes to the front, apply `scatter_nd`, and move them back."""
    rank = max(max(position.rank for position in positions), 1)
    positions = [position if position.rank else mb.expand_dims(x=position, axes=[0]) for position in positions]
    sizes = _broadcast_index_sizes(positions, rank)
    stacked = mb.stack(values=[broadcast_to(position, sizes) for position in positions], axis=rank)
    lead, entire = _locate_index_axes(x, axes, rank)
    filled = iter(sizes)
    values = broadcast_to(values, [next(filled) if size is None else size for size in entire])
    front = list(range(lead, lead + rank))
    order = front + [place for place in range(len(entire)) if place not in front]
    values = mb.transpose(x=values, perm=order) if order != sorted(order) else values
    perm = axes + [axis for axis in range(x.rank) if axis not in axes]
    data = mb.transpose(x=x, perm=perm) if perm != sorted(perm) else x
    as_number = types.int32 if x.dtype == types.bool else x.dtype
    new = cast_to(mb.scatter_nd(data=cast_to(data, as_number), indices=stacked, updates=cast_to(values, as_number),
                                mode="add" if accumulate else "update"), x.dtype)
    return mb.transpose(x=new, perm=[perm.index(axis) for axis in range(x.rank)]) if perm != sorted(perm) else new


def _broadcast_index_sizes(positions: list[Var], rank: int) -> list[Any]:
    """Return the sizes to which the indices broadcast, including dynamic sizes."""
    sizes: list[Any] = [1] * rank
    for position in positions:
        for place, size in enumerate(reversed(get_dims(position)), start=1):
            if not (isinstance(size, int) and size == 1):
                sizes[-place] = size
    return sizes
