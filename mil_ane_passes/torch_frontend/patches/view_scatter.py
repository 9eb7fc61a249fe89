"""Writes through views as values: slice_scatter, select_scatter, diagonal_scatter, copy.

Programs of torch.export and our own functionalization of TorchScript both contain these ops. coremltools lowers them to
a reshape and `scatter`, which is unsupported on the ANE, fails for flexible sizes and writes the wrong elements for
some axes. Here they are slices and `concat`, `slice_update` (iOS18) or a select between the old and the new.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    broadcast_to,
    cast_to,
    get_dims,
    make_range,
    name_result,
    normalize_axis,
    to_python,
    to_tensor,
)
from ..probes import convert_to_mil, find_fault, trace_function
from ..slice_assignment import assign_at_positions, assign_slice, wrap_index

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
    fault = find_fault(write, x, flexible=(0, 1))
    kinds = {op.op_type for op in convert_to_mil(trace_function(write, x), x).functions["main"].operations}
    return fault or ("leaves the ANE (scatter)" if kinds & {"scatter", "scatter_nd"} else None)


@PATCH.op("slice_scatter")
def slice_scatter(context: Any, node: Any) -> None:
    """Lower slice_scatter(self, src, dim, start, end, step)"""
    inputs = bind_arguments(context, node, "self src dim=0 start=None end=None step=1")
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), inputs.self.rank)
    new = assign_slice(
        context, inputs.self, inputs.src, axis, inputs.start, inputs.end, to_python(inputs.step, node, "step")
    )
    add_result(context, node, name_result(new, node, inputs.self, inputs.src))


@PATCH.op("select_scatter")
def select_scatter(context: Any, node: Any) -> None:
    """Lower select_scatter(self, src, dim, index)"""
    inputs = bind_arguments(context, node, "self src dim index")
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), inputs.self.rank)
    update = mb.expand_dims(x=inputs.src, axes=[axis]) if inputs.src.rank else mb.reshape(x=inputs.src, shape=[1])
    index = inputs.index
    if isinstance(index, Var) and index.val is None:
        place = mb.squeeze(x=index) if index.rank else index
        new = assign_at_positions(inputs.self, update, {axis: wrap_index(place, get_dims(inputs.self)[axis])})
    else:
        start = int(np.asarray(to_python(index, node, "index")).item())
        new = assign_slice(context, inputs.self, update, axis, start, start + 1 or None, 1)
    add_result(context, node, name_result(new, node, inputs.self, inputs.src))


@PATCH.op("copy")
def copy(context: Any, node: Any) -> None:
    """Lower copy(self, src): src in the shape and dtype of self."""
    inputs = bind_arguments(context, node, "self src non_blocking=False")
    if 0 in inputs.self.shape:  # nothing to write to; a tile cannot make an empty tensor
        add_result(context, node, mb.identity(x=inputs.self, name=node.name))
        return
    source = cast_to(to_tensor(inputs.src), inputs.self.dtype)
    add_result(context, node, name_result(broadcast_to(source, get_dims(inputs.self)), node, inputs.src))


@PATCH.op("diagonal_scatter")
def diagonal_scatter(context: Any, node: Any) -> None:
    """Lower diagonal_scatter(self, src, offset, dim1, dim2): element (i, i + offset) of each matrix is src[..., i]."""
    inputs = bind_arguments(context, node, "self src offset=0 dim1=0 dim2=1")
    x, rank = inputs.self, inputs.self.rank
    first, second = (normalize_axis(to_python(dim, node, "dim"), rank) for dim in (inputs.dim1, inputs.dim2))
    order = [axis for axis in range(rank) if axis not in (first, second)] + [first, second]
    matrices = mb.transpose(x=x, perm=order)
    rows, columns = get_dims(matrices)[-2:]
    offset = to_python(inputs.offset, node, "offset")
    line = _pad_diagonal_rows(cast_to(inputs.src, x.dtype), rows, max(0, -offset), node)
    there = mb.equal(x=mb.expand_dims(x=mb.add(x=make_range(rows), y=np.int32(offset)), axes=[1]),
                     y=mb.expand_dims(x=make_range(columns), axes=[0]))
    new = mb.select(cond=there, a=mb.expand_dims(x=line, axes=[-1]), b=matrices)
    back = [order.index(axis) for axis in range(rank)]
    add_result(context, node, mb.transpose(x=new, perm=back, name=node.name))


def _pad_diagonal_rows(line: Var, rows: Any, before: int, node: Any) -> Var:
    """Place the diagonal's elements in their rows; the other rows contain zeros, which nothing reads."""
    length = line.shape[-1]
    if not isinstance(rows, int) or not isinstance(length, int | np.integer):
        if before == 0 and rows is not None and get_dims(line)[-1] is not None and line.shape[-1] == _get_symbol(rows):
            return line
        raise NotConverted.at(node, "writes to a diagonal of a flexible size", "fix the matrix's sizes")
    after = rows - before - int(length)
    parts = [_make_zeros(line, before), line, _make_zeros(line, after)]
    kept = [part for part in parts if part is not None]
    return mb.concat(values=kept, axis=line.rank - 1) if len(kept) > 1 else line


def _make_zeros(like: Var, count: int) -> Var | None:
    if count <= 0:
        return None
    zero = cast_to(mb.const(val=np.float32(0)), like.dtype)
    return broadcast_to(zero, [*get_dims(like)[:-1], count])


def _get_symbol(size: Any) -> Any:
    return size.sym_val if isinstance(size, Var) else size


