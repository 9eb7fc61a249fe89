"""Assignment to a window of a tensor: `x[:, a:b:s] = y` as values, in ops that stay on the ANE where that is exact.

From iOS18 on a window is a `slice_update`, which Core ML executes in place (also in a state). Before that, a window of
constant position and size becomes a `concat` of slices. Where the model computes the position, a window of size 1 is a
select that compares positions, and a larger one is a `scatter`. Nothing is multiplied by a mask, so infinities and NaN
in the replaced elements leave no trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil._deployment_compatibility import AvailableTarget
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

from .lowering import cast_to, get_dims, make_range, to_size_vector, to_tensor

__all__ = ["assign_at_positions", "assign_slice", "find_lower_bound", "scan_axis", "slice_axis", "wrap_index"]

_OPEN_END = 2**31 - 1
"""The end of an open slice in torch: this number or more."""


def assign_slice(context: Any, x: Var, update: Var, axis: int, start: Any, end: Any, step: int) -> Var:
    """Replace `x[..., start:end:step, ...]` along `axis` by `update`, which has the shape of that slice.

    `start` and `end` are ints (negative ones count from the end), rank 0 Vars or None.
    """
    update = cast_to(update, x.dtype)
    start, end = _read_bound(start, 0), _read_bound(end, None)
    if isinstance(end, int) and end >= _OPEN_END:
        end = None
    size = x.shape[axis]
    if isinstance(size, int | np.integer):
        start, end = _clamp_bound(start, int(size)), int(size) if end is None else _clamp_bound(end, int(size))
        if not isinstance(start, Var) and not isinstance(end, Var):
            return _assign_known_slice(x, update, axis, start, end, step, int(size))
    elif step == 1 and not _has_slice_update() and _is_always_inside(context, size, start, end):
        return _concat_around(x, update, axis, start, end)
    return _assign_computed_slice(x, update, axis, start, step)


def assign_at_positions(x: Var, update: Var, places: dict[int, Any]) -> Var:
    """Replace one position along each axis of `places`; `update` has size 1 there, and the sizes of `x` elsewhere.

    A place is a rank 0 Var or an int, from 0 up to the size.
    """
    update = cast_to(update, x.dtype)
    if _has_slice_update():
        sizes = get_dims(x)
        begin = [places.get(axis, 0) for axis in range(x.rank)]
        end = [_add_one(places[axis]) if axis in places else sizes[axis] for axis in range(x.rank)]
        return mb.slice_update(x=x, update=update, begin=to_size_vector(begin), end=to_size_vector(end))
    sizes = get_dims(x)
    there = None
    for axis, place in places.items():
        shape = [1] * x.rank
        shape[axis] = -1
        equal = mb.equal(x=mb.reshape(x=make_range(sizes[axis]), shape=shape), y=place)
        there = equal if there is None else mb.logical_and(x=there, y=equal)
    return mb.select(cond=there, a=update, b=x)


def wrap_index(index: Any, size: Any) -> Any:
    """Count an index from the front: add `size` to a negative one. Returns an int where constant, else a Var."""
    if isinstance(index, int | np.integer) and isinstance(size, int | np.integer):
        return int(index) % int(size)
    if isinstance(index, int | np.integer):
        return int(index) if index >= 0 else mb.add(x=size, y=np.int32(index))
    index = cast_to(index, types.int32)
    return mb.select(cond=mb.less(x=index, y=np.int32(0)), a=mb.add(x=index, y=size), b=index)


def find_lower_bound(context: Any, size: Any) -> int:
    """Return the smallest value of a dynamic size, by the ranges of the inputs; 0 where they do not limit it."""
    if isinstance(size, int | np.integer):
        return int(size)
    for spec in context.torch_graph.inputs.values():
        for dim in getattr(getattr(spec, "shape", None), "shape", None) or ():
            if getattr(dim, "symbol", None) is not None and dim.symbol == size:
                return int(dim.lower_bound)
    return 0


def _read_bound(value: Any, default: Any) -> Any:
    """Return a bound as an int where it is constant, else as a rank 0 int32 Var."""
    if value is None:
        return default
    if isinstance(value, Var):
        if value.val is not None:
            return int(np.asarray(value.val).item())
        return cast_to(mb.squeeze(x=value) if value.rank else value, types.int32)
    return int(value)


def _clamp_bound(bound: Any, size: int) -> Any:
    if isinstance(bound, Var):
        return bound
    return min(max(bound + size if bound < 0 else bound, 0), size)


def _is_always_inside(context: Any, size: Any, start: Any, end: Any) -> bool:
    """Return whether a slice of a flexible axis is never truncated, so that its bounds do not depend on the size."""
    if isinstance(start, Var) or isinstance(end, Var):
        return False
    reach = max(abs(bound) for bound in (start, end if end is not None else 0))
    if end is not None and (start < 0) == (end < 0) and start > end:
        return False
    return reach <= find_lower_bound(context, size) and (end is None or (start < 0) == (end < 0) or start == 0)


def _assign_known_slice(x: Var, update: Var, axis: int, start: int, end: int, step: int, size: int) -> Var:
    count = max(0, -(-(end - start) // step))
    if count == 0:
        return x
    if _has_slice_update():
        return _emit_slice_update(x, update, axis, start, start + (count - 1) * step + 1, step)
    if step == 1 or count == 1:
        return _concat_around(x, update, axis, start, start + count if start + count < size else None)
    return _interleave_update(x, update, axis, start, step, count, size)


def _concat_around(x: Var, update: Var, axis: int, start: int, end: int | None) -> Var:
    """Concatenate x[:start], update and x[end:]."""
    parts = [] if start == 0 else [slice_axis(x, axis, None, start)]
    parts.append(update)
    if end is not None:
        parts.append(slice_axis(x, axis, end, None))
    return mb.concat(values=parts, axis=axis) if len(parts) > 1 else update


def _interleave_update(x: Var, update: Var, axis: int, start: int, step: int, count: int, size: int) -> Var:
    """Replace every step-th element.

    Uses blocks of `step` elements with a new first column, and the first element of the last block.
    """
    last = start + (count - 1) * step
    blocks = slice_axis(x, axis, start, last)
    dims = get_dims(blocks)
    split = to_size_vector([*dims[:axis], count - 1, step, *dims[axis + 1:]])
    rest = slice_axis(mb.reshape(x=blocks, shape=split), axis + 1, 1, None)
    head = mb.expand_dims(x=slice_axis(update, axis, 0, count - 1), axes=[axis + 1])
    woven = mb.reshape(x=mb.concat(values=[head, rest], axis=axis + 1), shape=to_size_vector(dims))
    tail = slice_axis(update, axis, count - 1, None)
    return _concat_around(
        x, mb.concat(values=[woven, tail], axis=axis), axis, start, last + 1 if last + 1 < size else None
    )


def _assign_computed_slice(x: Var, update: Var, axis: int, start: Any, step: int) -> Var:
    """Assign a slice whose position is dynamic: as many elements from `start` on as `update` has."""
    size, count = get_dims(x)[axis], get_dims(update)[axis]
    if isinstance(start, Var) or start < 0:  # a slice that starts before the front starts at the front
        start = mb.maximum(x=to_tensor(wrap_index(start, size)), y=np.int32(0))
    if _has_slice_update():
        reach = _apply_arithmetic(mb.add, _apply_arithmetic(mb.mul, _apply_arithmetic(mb.sub, count, 1), step), 1)
        return _emit_slice_update(x, update, axis, start, _apply_arithmetic(mb.add, start, reach), step)
    if isinstance(count, int) and count == 1:
        return assign_at_positions(x, update, {axis: start})
    indices = mb.add(x=mb.mul(x=make_range(count), y=np.int32(step)), y=start)
    data, new = (cast_to(inputs, types.int32) if x.dtype == types.bool else inputs for inputs in (x, update))
    return cast_to(mb.scatter(data=data, indices=indices, updates=new, axis=axis, mode="update"), x.dtype)


def _emit_slice_update(x: Var, update: Var, axis: int, start: Any, end: Any, step: int) -> Var:
    begins: list[Any] = [0] * x.rank
    ends = get_dims(x)
    begins[axis], ends[axis] = start, end
    others = [place != axis for place in range(x.rank)]
    ends = [0 if other else bound for other, bound in zip(others, ends, strict=True)]
    stride = [step if place == axis else 1 for place in range(x.rank)]
    return mb.slice_update(x=x, update=update, begin=to_size_vector(begins), end=to_size_vector(ends), stride=stride,
                           begin_mask=others, end_mask=others)


def slice_axis(x: Var, axis: int, start: int | None, end: int | None) -> Var:
    """Return `x[..., start:end, ...]` along `axis`."""
    others = [place != axis for place in range(x.rank)]
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[axis], ends[axis] = start or 0, end or 0
    return mb.slice_by_index(x=x, begin=begins, end=ends, begin_mask=[other or start is None for other in others],
                             end_mask=[other or end is None for other in others])


def _has_slice_update() -> bool:
    return bool(is_current_opset_version_compatible_with(AvailableTarget.iOS18))


def _add_one(place: Any) -> Any:
    return _apply_arithmetic(mb.add, place, 1)


def _apply_arithmetic(op: Any, x: Any, y: Any) -> Any:
    if isinstance(x, int) and isinstance(y, int):
        return _INT_OPERATIONS[op](x, y)
    return op(x=to_tensor(x), y=to_tensor(y))


_INT_OPERATIONS = {mb.add: operator.add, mb.sub: operator.sub, mb.mul: operator.mul}


def scan_axis(x: Var, axis: int, combine: Callable[..., Var]) -> Var:
    """Compute the running result of an associative `combine(x=..., y=...)` along an axis of constant size.

    Takes log2(n) steps. After a step of length s each position holds the result of up to 2s elements.
    """
    length, step = int(x.shape[axis]), 1
    while step < length:
        spans = (0, step), (0, length - step), (step, length)
        head, early, late = (_slice_span(x, axis, begin, end) for begin, end in spans)
        x = mb.concat(values=[head, combine(x=late, y=early)], axis=axis)
        step *= 2
    return x


def _slice_span(x: Var, axis: int, begin: int, end: int) -> Var:
    others = [place != axis for place in range(x.rank)]
    return mb.slice_by_index(x=x, begin=[0 if other else begin for other in others], begin_mask=others,
                             end=[0 if other else end for other in others], end_mask=others)
