"""diagonal, narrow and unbind for any axes and offsets, computed starts and flexible sizes.

coremltools supports diagonal only for the first two axes without an offset, and narrow and unbind only for constant
sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, get_dims, normalize_axis, to_python, to_size_vector
from ..probes import find_fault
from ..slice_assignment import wrap_index

PATCH = Patch(code="TORCH151",
              title="diagonal, narrow and unbind fail for other axes and flexible sizes", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    def read(x: Any) -> Any:
        return x.diagonal(1), x.narrow(1, 1, 2), x.unbind(1)[0]

    return find_fault(read, torch.arange(12.).reshape(3, 4), flexible=(0,))


@PATCH.op("narrow", "narrow_copy")
def narrow(context: Any, node: Any) -> None:
    """Lower narrow(self, dim, start, length)"""
    inputs = bind_arguments(context, node, "self dim start length")
    x = inputs.self
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    length = to_python(inputs.length, node, "length")
    others = [place != axis for place in range(x.rank)]
    if isinstance(inputs.start, Var) and inputs.start.val is None:
        start = wrap_index(mb.squeeze(x=inputs.start) if inputs.start.rank else inputs.start, get_dims(x)[axis])
        begin = to_size_vector([start if place == axis else 0 for place in range(x.rank)])
        size = [length if place == axis else -1 for place in range(x.rank)]
        add_result(context, node, mb.slice_by_size(x=x, begin=begin, size=size, name=node.name))
        return
    start = int(np.asarray(to_python(inputs.start, node, "start")).item())
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[axis], ends[axis] = start, start + length
    others[axis] = False
    open_end = [other or (start < 0 and start + length == 0) for other in others]
    add_result(context, node, mb.slice_by_index(x=x, begin=begins, end=ends, begin_mask=others, end_mask=open_end,
                                                name=node.name))


@PATCH.op("unbind", "unbind_copy")
def unbind(context: Any, node: Any) -> None:
    """Lower unbind(self, dim): a list of slices."""
    inputs = bind_arguments(context, node, "self dim=0")
    x = inputs.self
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    count = x.shape[axis]
    if not isinstance(count, int | np.integer):
        raise NotConverted.at(node, "unbinds an axis of flexible size", "fix that size, or loop over indices")
    others = [place != axis for place in range(x.rank)]
    context.add([_select_index(x, axis, index, others) for index in range(int(count))], torch_name=node.name)


def _select_index(x: Var, axis: int, index: int, others: list[bool]) -> Var:
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[axis], ends[axis] = index, index + 1
    return mb.slice_by_index(x=x, begin=begins, end=ends, begin_mask=others, end_mask=others,
                             squeeze_mask=[not other for other in others])


@PATCH.op("diagonal", "diagonal_copy")
def diagonal(context: Any, node: Any) -> None:
    """Lower diagonal(self, offset, dim1, dim2): of the matrices made of the two axes, as the last axis."""
    inputs = bind_arguments(context, node, "self offset=0 dim1=0 dim2=1")
    x, rank = inputs.self, inputs.self.rank
    offset = to_python(inputs.offset, node, "offset")
    pair = [normalize_axis(to_python(dim, node, "dim"), rank) for dim in (inputs.dim1, inputs.dim2)]
    order = [axis for axis in range(rank) if axis not in pair] + pair
    matrices = mb.transpose(x=x, perm=order) if order != sorted(order) else x
    rows, columns = matrices.shape[-2:]
    if isinstance(rows, int | np.integer) and isinstance(columns, int | np.integer):
        line = _read_diagonal_by_stride(matrices, offset, int(rows), int(columns))
    elif offset == 0 and rows == columns:
        line = _read_diagonal_by_sum(matrices)
    else:
        raise NotConverted.at(node, "reads a diagonal of a matrix with different flexible sizes", "fix its sizes")
    add_result(context, node, mb.identity(x=line, name=node.name))


def _read_diagonal_by_stride(matrices: Var, offset: int, rows: int, columns: int) -> Var:
    """Read diagonals from matrices flattened to one row, where they are every (columns + 1)-th element."""
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    first = offset if offset >= 0 else -offset * columns
    flat = mb.reshape(x=matrices, shape=to_size_vector([*get_dims(matrices)[:-2], rows * columns]))
    others = [True] * (flat.rank - 1) + [False]
    zeros = [0] * (flat.rank - 1)
    step = columns + 1
    return mb.slice_by_index(x=flat, begin=[*zeros, first], end=[*zeros, first + (count - 1) * step + 1],
                             stride=[1] * (flat.rank - 1) + [step], begin_mask=others, end_mask=others)


def _read_diagonal_by_sum(matrices: Var) -> Var:
    """Read diagonals as row sums of the matrix with zeros off the diagonal.

    The sums are exact, and the size may be dynamic.
    """
    size = get_dims(matrices)[-1]
    numbers = mb.range_1d(start=0, end=size, step=1)
    there = mb.equal(x=mb.expand_dims(x=numbers, axes=[1]), y=mb.expand_dims(x=numbers, axes=[0]))
    as_number = types.int32 if matrices.dtype == types.bool else matrices.dtype
    values = cast_to(matrices, as_number)
    zero = cast_to(mb.const(val=np.float32(0)), as_number)
    return cast_to(mb.reduce_sum(x=mb.select(cond=there, a=values, b=zero), axes=[-1], keep_dims=False), matrices.dtype)
