"""Writes through views as values: slice_scatter, select_scatter, diagonal_scatter, copy.

torch.export and our own functionalisation of TorchScript both end in these. The host lowers them to a reshape and
`scatter`, which leaves the ANE, fails for flexible sizes and writes the wrong elements for some axes; here they are
slices and `concat`, `slice_update` (iOS18) or a select between the old and the new.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add, axis_of, bind, broadcast_to, cast, dims, named, numbers_up_to, python, tensor
from ..probing import converted, traced, wrong
from ..windows import assign_at, assign_slice, wrapped

PATCH = Patch(
    code="TORCH152",
    title="slice_scatter, select_scatter and copy go through reshape and scatter, and fail for flexible sizes",
    upstream=("https://github.com/apple/coremltools/issues/1522",),
)


@PATCH.probe
def probe() -> str | None:
    import torch

    def write(x: Any) -> Any:
        return torch.slice_scatter(x, x[:, 1:3] * 2, 1, 1, 3)

    x = torch.arange(12.).reshape(3, 4)
    fault = wrong(write, x, flexible=(0, 1))
    kinds = {op.op_type for op in converted(traced(write, x), x).functions["main"].operations}
    return fault or ("leaves the ANE (scatter)" if kinds & {"scatter", "scatter_nd"} else None)


@PATCH.op("slice_scatter")
def slice_scatter(context: Any, node: Any) -> None:
    """slice_scatter(self, src, dim, start, end, step)"""
    given = bind(context, node, "self src dim=0 start=None end=None step=1")
    axis = axis_of(python(given.dim, node, "dim"), given.self.rank)
    new = assign_slice(context, given.self, given.src, axis, given.start, given.end, python(given.step, node, "step"))
    add(context, node, named(new, node, given.self, given.src))


@PATCH.op("select_scatter")
def select_scatter(context: Any, node: Any) -> None:
    """select_scatter(self, src, dim, index)"""
    given = bind(context, node, "self src dim index")
    axis = axis_of(python(given.dim, node, "dim"), given.self.rank)
    update = mb.expand_dims(x=given.src, axes=[axis]) if given.src.rank else mb.reshape(x=given.src, shape=[1])
    index = given.index
    if isinstance(index, Var) and index.val is None:
        place = mb.squeeze(x=index) if index.rank else index
        new = assign_at(given.self, update, {axis: wrapped(place, dims(given.self)[axis])})
    else:
        start = int(np.asarray(python(index, node, "index")).item())
        new = assign_slice(context, given.self, update, axis, start, start + 1 or None, 1)
    add(context, node, named(new, node, given.self, given.src))


@PATCH.op("copy")
def copy(context: Any, node: Any) -> None:
    """copy(self, src): src in the shape and dtype of self."""
    given = bind(context, node, "self src non_blocking=False")
    if 0 in given.self.shape:  # nothing to write to, and no tile makes nothing of something
        add(context, node, mb.identity(x=given.self, name=node.name))
        return
    source = cast(tensor(given.src), given.self.dtype)
    add(context, node, named(broadcast_to(source, dims(given.self)), node, given.src))


@PATCH.op("diagonal_scatter")
def diagonal_scatter(context: Any, node: Any) -> None:
    """diagonal_scatter(self, src, offset, dim1, dim2): element (i, i + offset) of each matrix is src[..., i]."""
    given = bind(context, node, "self src offset=0 dim1=0 dim2=1")
    x, rank = given.self, given.self.rank
    first, second = (axis_of(python(dim, node, "dim"), rank) for dim in (given.dim1, given.dim2))
    order = [axis for axis in range(rank) if axis not in (first, second)] + [first, second]
    matrices = mb.transpose(x=x, perm=order)
    rows, columns = dims(matrices)[-2:]
    offset = python(given.offset, node, "offset")
    line = _rows_of(cast(given.src, x.dtype), rows, max(0, -offset), node)
    there = mb.equal(x=mb.expand_dims(x=mb.add(x=numbers_up_to(rows), y=np.int32(offset)), axes=[1]),
                     y=mb.expand_dims(x=numbers_up_to(columns), axes=[0]))
    new = mb.select(cond=there, a=mb.expand_dims(x=line, axes=[-1]), b=matrices)
    back = [order.index(axis) for axis in range(rank)]
    add(context, node, mb.transpose(x=new, perm=back, name=node.name))


def _rows_of(line: Var, rows: Any, before: int, node: Any) -> Var:
    """The diagonal's elements at the rows they stand in; the other rows hold zeros, which nothing reads."""
    length = line.shape[-1]
    if not isinstance(rows, int) or not isinstance(length, int | np.integer):
        if before == 0 and rows is not None and dims(line)[-1] is not None and line.shape[-1] == _symbol(rows):
            return line
        raise NotConverted.at(node, "writes to a diagonal of a flexible size", "fix the matrix's sizes")
    after = rows - before - int(length)
    parts = [_zeros(line, before), line, _zeros(line, after)]
    kept = [part for part in parts if part is not None]
    return mb.concat(values=kept, axis=line.rank - 1) if len(kept) > 1 else line


def _zeros(like: Var, count: int) -> Var | None:
    if count <= 0:
        return None
    zero = cast(mb.const(val=np.float32(0)), like.dtype)
    return broadcast_to(zero, [*dims(like)[:-1], count])


def _symbol(size: Any) -> Any:
    return size.sym_val if isinstance(size, Var) else size


