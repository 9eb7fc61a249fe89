"""`index_add`, `index_copy`, `index_fill`: writes to the rows that an index names along one dimension.

index_fill is a mask, constant for a constant index; the others are `scatter` along the axis, with negative indices
counted from the end first. Indices that occur twice add twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..creation import make_filled_like
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    get_dims,
    make_range,
    name_result,
    normalize_axis,
    to_python,
    to_tensor,
)

PATCH = Patch(code="TORCH122",
              title="`index_add`, `index_copy` and `index_fill` are not implemented", upstream=("none known",))


@PATCH.op("index_add", "index_copy")
def lower_index_write(context: Any, node: Any) -> None:
    """Lower index_add(self, dim, index, source, alpha=1), index_copy(self, dim, index, source)."""
    inputs = bind_arguments(context, node, "self dim index source alpha=1")
    adds = node.kind.startswith("index_add")
    x, axis = inputs.self, normalize_axis(to_python(inputs.dim, node, "dim"), inputs.self.rank)
    if x.rank == 0:
        raise NotConverted.at(node, "writes to a tensor of rank 0")
    as_bool = x.dtype == types.bool
    if as_bool and adds:
        raise NotConverted.at(node, "adds bools", "use logical_or")
    entire = cast_to(x, types.int32) if as_bool else x
    source = cast_to(to_tensor(inputs.source), entire.dtype)
    if adds and inputs.alpha is not None and not _is_one(inputs.alpha):
        source = mb.mul(x=source, y=to_tensor(inputs.alpha, entire.dtype))
    source = mb.expand_dims(x=source, axes=[0]) if source.rank == 0 else source
    index = _normalize_index(inputs.index, get_dims(x)[axis])
    mode = "add" if adds else "update"
    written = mb.scatter(data=entire, indices=index, updates=source, axis=axis, mode=mode)
    add_result(context, node, name_result(cast_to(written, x.dtype), node))


@PATCH.op("index_fill", "index_fill.int_scalar", "index_fill.int_tensor")
def index_fill(context: Any, node: Any) -> None:
    """Lower index_fill(self, dim, index, value)."""
    inputs = bind_arguments(context, node, "self dim index value")
    x, axis = inputs.self, normalize_axis(to_python(inputs.dim, node, "dim"), inputs.self.rank)
    if x.rank == 0:
        raise NotConverted.at(node, "writes to a tensor of rank 0")
    size = get_dims(x)[axis]
    index = _normalize_index(inputs.index, size)
    if isinstance(size, int) and index.val is not None:
        mask = mb.const(val=np.isin(np.arange(size), index.val))
    else:
        hits = mb.equal(x=mb.expand_dims(x=make_range(size), axes=[1]), y=mb.expand_dims(x=index, axes=[0]))
        mask = cast_to(mb.reduce_max(x=cast_to(hits, types.int32), axes=[1]), types.bool)
    behind = list(range(1, x.rank - axis))
    mask = mb.expand_dims(x=mask, axes=behind) if behind else mask
    ahead = list(range(axis))
    mask = mb.expand_dims(x=mask, axes=ahead) if ahead else mask
    _write_masked(context, node, x, mask, inputs.value)


def _write_masked(context: Any, node: Any, x: Var, mask: Var, value: Any) -> None:
    """Write `value` where the mask (broadcast to x) is true."""
    if x.dtype == types.bool:
        new = cast_to(to_tensor(value), types.bool)
        kept = mb.logical_and(x=x, y=mb.logical_not(x=mask))
        add_result(context, node, mb.logical_or(x=kept, y=mb.logical_and(x=mask, y=new), name=node.name))
        return
    everywhere = mb.logical_or(x=mask, y=make_filled_like(x, False, types.bool))
    add_result(context, node, mb.select(cond=everywhere, a=make_filled_like(x, value, x.dtype), b=x, name=node.name))


def _is_one(alpha: Any) -> bool:
    value = alpha.val if isinstance(alpha, Var) else alpha
    return value is not None and bool(value == 1)


def _normalize_index(index: Any, size: Any) -> Var:
    """Convert the index to int32 of rank 1 without negatives."""
    index = cast_to(to_tensor(index), types.int32)
    index = mb.expand_dims(x=index, axes=[0]) if index.rank == 0 else index
    if index.val is not None and (isinstance(size, int) or np.min(index.val, initial=0) >= 0):
        return mb.const(val=(index.val % size if isinstance(size, int) else index.val).astype(np.int32))
    return mb.select(cond=mb.less(x=index, y=0), a=mb.add(x=index, y=size), b=index)
