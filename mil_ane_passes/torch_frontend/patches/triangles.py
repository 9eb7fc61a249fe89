"""`triu` and `tril` by a mask, and `roll` by two slices.

coremltools computes the triangle of a tensor by subtracting the other one, which makes NaN of inf - inf: the causal
mask `full(-inf).triu(1)`. Here a band selects, which is constant or computed from the diagonal; the triangle of a
constant tensor is a constant. A roll by a constant shift is a concat of two slices, for any size, without gathers and
ranges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import make_constant, make_filled_like
from ..lowering import (
    add_result,
    bind_arguments,
    get_dims,
    has_static_shape,
    is_constant,
    make_range,
    name_result,
    normalize_axis,
    to_python,
    to_size_vector,
)
from ..probes import find_fault
from ..slice_assignment import find_lower_bound

PATCH = Patch(code="TORCH148", severity=Severity.WRONG,
              title="`triu`, `tril` make NaN of inf; `roll` gathers", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    infinite = torch.full((3, 3), float("inf"))
    return find_fault(lambda x: torch.triu(x, 1), infinite) or find_fault(lambda x: torch.tril(x, -1), infinite)


@PATCH.op("triu", "tril")
def lower_triangle(context: Any, node: Any) -> None:
    """Lower triu(self, diagonal=0), tril(self, diagonal=0)."""
    inputs = bind_arguments(context, node, "self diagonal=0")
    x, diagonal, upper = inputs.self, inputs.diagonal, node.kind.startswith("triu")
    if is_constant(diagonal):
        diagonal = int(to_python(diagonal, node, "diagonal"))
    elif not types.is_int(diagonal.dtype):
        diagonal = mb.cast(x=diagonal, dtype="int32")
    if x.val is not None and isinstance(diagonal, int):
        value = (np.triu if upper else np.tril)(x.val, diagonal)
        add_result(context, node, name_result(make_constant(value, x.dtype), node))
        return
    mask = _make_triangle_mask(x, diagonal, upper)
    if x.dtype == types.bool:
        add_result(context, node, mb.logical_and(x=x, y=mask, name=node.name))
        return
    add_result(context, node, mb.select(cond=mask, a=x, b=make_filled_like(x, 0, x.dtype), name=node.name))


def _make_triangle_mask(x: Var, diagonal: int | Var, upper: bool) -> Var:
    """Make a mask that is true inside the triangle, of a shape that broadcasts to that of `x`.

    A diagonal is computed in the mask of a chunk behind a cache: `ones(queries, keys).tril(keys - queries)`.
    """
    if has_static_shape(x) and isinstance(diagonal, int):
        inside = (np.triu if upper else np.tril)(np.ones(x.shape[-2:], dtype=bool), diagonal)
        return mb.const(val=inside.reshape([1] * (x.rank - 2) + list(inside.shape)))
    height, width = get_dims(x)[-2:]
    distance = mb.sub(x=mb.expand_dims(x=make_range(width), axes=[0]),
                      y=mb.expand_dims(x=make_range(height), axes=[1]))
    compare = mb.greater_equal if upper else mb.less_equal
    limit = np.int32(diagonal) if isinstance(diagonal, int) else diagonal
    return mb.logical_or(x=compare(x=distance, y=limit), y=make_filled_like(x, False, types.bool))


@PATCH.op("roll")
def roll(context: Any, node: Any) -> None:
    """Lower roll(self, shifts, dims=[]): without dimensions, of the flattened tensor."""
    inputs = bind_arguments(context, node, "self shifts dims=[]")
    x, shifts, axes = inputs.self, to_python(inputs.shifts, node, "shifts"), to_python(inputs.dims, node, "dims")
    shifts, axes = (item if isinstance(item, list) else [] if item is None else [item] for item in (shifts, axes))
    if not x.rank:
        add_result(context, node, name_result(x, node))
        return
    flat = not axes
    rolled = mb.reshape(x=x, shape=[-1]) if flat else x
    for shift, axis in zip(shifts, axes or [0], strict=True):
        rolled = _roll_axis(context, rolled, int(shift), normalize_axis(int(axis), rolled.rank))
    if flat:
        rolled = mb.reshape(x=rolled, shape=[int(size) for size in x.shape] if has_static_shape(x) else mb.shape(x=x))
    add_result(context, node, name_result(rolled, node))


def _roll_axis(context: Any, x: Var, shift: int, axis: int) -> Var:
    size = x.shape[axis]
    if isinstance(size, int | np.integer):
        shift %= int(size)
    elif abs(shift) > max(find_lower_bound(context, size), 1):
        return _roll_axis_far(x, shift, axis)
    if shift == 0:
        return x
    parts = [_slice_axis(x, axis, -shift, None), _slice_axis(x, axis, 0, -shift)]
    return mb.concat(values=parts, axis=axis)


def _roll_axis_far(x: Var, shift: int, axis: int) -> Var:
    """Roll by a shift that may be larger than the axis.

    Takes the window of two copies of the tensor that starts at -shift mod size.
    """
    size = get_dims(x)[axis]
    begin = to_size_vector([mb.mod(x=np.int32(-shift), y=size) if place == axis else 0 for place in range(x.rank)])
    window = to_size_vector([size if place == axis else -1 for place in range(x.rank)])
    return mb.slice_by_size(x=mb.concat(values=[x, x], axis=axis), begin=begin, size=window)


def _slice_axis(x: Var, axis: int, start: int, end: int | None) -> Var:
    here = [place == axis for place in range(x.rank)]
    return mb.slice_by_index(x=x, begin=[start if this else 0 for this in here],
                             end=[(end or 0) if this else 0 for this in here],
                             end_mask=[not this or end is None for this in here])
