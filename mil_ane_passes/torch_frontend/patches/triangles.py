"""`triu` and `tril` by a mask, and `roll` by two slices.

The host takes the triangle of a tensor by subtracting the other one, which makes NaN of inf - inf: the causal mask
`full(-inf).triu(1)`. Here a constant band selects; of a constant tensor the triangle is a constant. A roll by a known
shift is two slices put together, for any size: no gather, no range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..creation import constant, filled_like
from ..lowering import add, axis_of, bind, dims, named, numbers_up_to, python, static, vector
from ..probing import wrong
from ..windows import lowest

PATCH = Patch(code="TORCH148",
              title="`triu`, `tril` make NaN of inf; `roll` gathers", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    infinite = torch.full((3, 3), float("inf"))
    return wrong(lambda x: torch.triu(x, 1), infinite) or wrong(lambda x: torch.tril(x, -1), infinite)


@PATCH.op("triu", "tril")
def triangle(context: Any, node: Any) -> None:
    """triu(self, diagonal=0), tril(self, diagonal=0)."""
    given = bind(context, node, "self diagonal=0")
    x, diagonal = given.self, int(python(given.diagonal, node, "diagonal"))
    upper = node.kind.startswith("triu")
    if x.val is not None:
        value = (np.triu if upper else np.tril)(x.val, diagonal)
        add(context, node, named(constant(value, x.dtype), node))
        return
    mask = _band(x, diagonal, upper)
    if x.dtype == types.bool:
        add(context, node, mb.logical_and(x=x, y=mask, name=node.name))
        return
    add(context, node, mb.select(cond=mask, a=x, b=filled_like(x, 0, x.dtype), name=node.name))


def _band(x: Var, diagonal: int, upper: bool) -> Var:
    """True inside the triangle, of a shape that broadcasts to that of `x`."""
    if static(x):
        inside = (np.triu if upper else np.tril)(np.ones(x.shape[-2:], dtype=bool), diagonal)
        return mb.const(val=inside.reshape([1] * (x.rank - 2) + list(inside.shape)))
    height, width = dims(x)[-2:]
    distance = mb.sub(x=mb.expand_dims(x=numbers_up_to(width), axes=[0]),
                      y=mb.expand_dims(x=numbers_up_to(height), axes=[1]))
    compare = mb.greater_equal if upper else mb.less_equal
    return mb.logical_or(x=compare(x=distance, y=np.int32(diagonal)), y=filled_like(x, False, types.bool))


@PATCH.op("roll")
def roll(context: Any, node: Any) -> None:
    """roll(self, shifts, dims=[]): without dimensions, of the flattened tensor."""
    given = bind(context, node, "self shifts dims=[]")
    x, shifts, axes = given.self, python(given.shifts, node, "shifts"), python(given.dims, node, "dims")
    shifts, axes = (item if isinstance(item, list) else [] if item is None else [item] for item in (shifts, axes))
    if not x.rank:
        add(context, node, named(x, node))
        return
    flat = not axes
    rolled = mb.reshape(x=x, shape=[-1]) if flat else x
    for shift, axis in zip(shifts, axes or [0], strict=True):
        rolled = _rolled(context, rolled, int(shift), axis_of(int(axis), rolled.rank))
    if flat:
        rolled = mb.reshape(x=rolled, shape=[int(size) for size in x.shape] if static(x) else mb.shape(x=x))
    add(context, node, named(rolled, node))


def _rolled(context: Any, x: Var, shift: int, axis: int) -> Var:
    size = x.shape[axis]
    if isinstance(size, int | np.integer):
        shift %= int(size)
    elif abs(shift) > max(lowest(context, size), 1):
        return _rolled_far(x, shift, axis)
    if shift == 0:
        return x
    parts = [_part(x, axis, -shift, None), _part(x, axis, 0, -shift)]
    return mb.concat(values=parts, axis=axis)


def _rolled_far(x: Var, shift: int, axis: int) -> Var:
    """By more than the size may be: a window of the tensor beside itself, from -shift mod size on."""
    size = dims(x)[axis]
    begin = vector([mb.mod(x=np.int32(-shift), y=size) if place == axis else 0 for place in range(x.rank)])
    window = vector([size if place == axis else -1 for place in range(x.rank)])
    return mb.slice_by_size(x=mb.concat(values=[x, x], axis=axis), begin=begin, size=window)


def _part(x: Var, axis: int, start: int, end: int | None) -> Var:
    here = [place == axis for place in range(x.rank)]
    return mb.slice_by_index(x=x, begin=[start if this else 0 for this in here],
                             end=[(end or 0) if this else 0 for this in here],
                             end_mask=[not this or end is None for this in here])
