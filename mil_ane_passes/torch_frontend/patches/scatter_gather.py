"""`gather`, `scatter`, `index_select` with an index that is smaller than the data, one number, or const ints.

torch's index may be shorter than the data along every axis except `dim`, and then covers a corner of the data. MIL's
gather_along_axis and scatter_along_axis require equal sizes. So the corner is sliced off, and concats restore the part
that a scatter does not change. Updates get the data's dtype, as a Python number does in torch; bools are computed as
ints. An index of rank 0 selects one slice and keeps the axis, which coremltools drops. `scatter_reduce` without the
data starts from the identity of its reduction, and returns the data where no update goes; a mean divides by the number
of updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...ir.query import get_flat_inputs, is_symbolic
from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    get_dims,
    has_static_shape,
    normalize_axis,
    to_python,
    to_size_vector,
    to_tensor,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH141", severity=Severity.WRONG,
              title="`scatter` of an int, without the data, and of indices smaller than it or of rank 0 is rejected or "
                    "miscompiled",
              upstream=("none known",))

_SCATTER_MODES = {None: "update", "update": "update", "add": "add", "sum": "add", "multiply": "mul", "prod": "mul",
                  "mean": "add", "amax": "max", "amin": "min"}


@PATCH.probe
def probe() -> str | None:
    import torch

    x, i = torch.arange(6.0).reshape(2, 3), torch.tensor([[1, 0]])
    return find_fault(lambda x: torch.index_select(x, 1, i[0, 0]), x) or find_fault(
        lambda x: torch.scatter(torch.gather(x, 1, i), 1, i[:, :1], 5), x)


@PATCH.op("gather")
def gather(context: Any, node: Any) -> None:
    """Lower gather(self, dim, index, *, sparse_grad=False)."""
    inputs = bind_arguments(context, node, "self dim index sparse_grad=False")
    x, index = to_tensor(inputs.self), cast_to(to_tensor(inputs.index), types.int32)
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    corner = _slice_corner(_cast_bools_to_int(x), index, axis, node)
    found = mb.gather_along_axis(x=corner, indices=index, axis=axis, name=node.name)
    add_result(context, node, cast_to(found, x.dtype))


@PATCH.op("index_select")
def index_select(context: Any, node: Any) -> None:
    """Lower index_select(self, dim, index): `index` of rank 1, or of rank 0 for one slice."""
    inputs = bind_arguments(context, node, "self dim index")
    x, index = to_tensor(inputs.self), cast_to(to_tensor(inputs.index), types.int32)
    if index.rank == 0 and x.rank > 0:
        index = to_tensor(np.array([index.val])) if index.val is not None else mb.expand_dims(x=index, axes=[0])
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    found = mb.gather(x=_cast_bools_to_int(x), indices=index, axis=axis, name=node.name)
    add_result(context, node, cast_to(found, x.dtype))


@PATCH.op("scatter", "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
def scatter(context: Any, node: Any) -> None:
    """Lower scatter(self, dim, index, src or value, *, reduce=None)."""
    inputs = bind_arguments(context, node, f"self dim index {_get_source_name(node)} reduce=None")
    source = inputs.src if hasattr(inputs, "src") else inputs.value
    _lower_scatter(context, node, inputs, source, to_python(inputs.reduce, node, "reduce"))


@PATCH.op("scatter_add")
def scatter_add(context: Any, node: Any) -> None:
    """Lower scatter_add(self, dim, index, src)."""
    inputs = bind_arguments(context, node, "self dim index src")
    _lower_scatter(context, node, inputs, inputs.src, "add")


@PATCH.op("scatter_reduce", "scatter_reduce.two")
def scatter_reduce(context: Any, node: Any) -> None:
    """Lower scatter_reduce(self, dim, index, src, reduce, *, include_self=True)."""
    inputs = bind_arguments(context, node, "self dim index src reduce include_self=True")
    _lower_scatter(context, node, inputs, inputs.src, to_python(inputs.reduce, node, "reduce"),
                   bool(to_python(inputs.include_self, node, "include_self")))


def _get_source_name(node: Any) -> str:
    return "value" if "value" in (node.kwinputs or {}) else "src"


def _lower_scatter(
    context: Any, node: Any, given: Any, source: Any, reduce: str | None, include_self: bool = True
) -> None:
    entire, index, updates = to_tensor(given.self), cast_to(to_tensor(given.index), types.int32), to_tensor(source)
    axis = normalize_axis(to_python(given.dim, node, "dim"), entire.rank)
    data = _cast_bools_to_int(entire)
    updates = cast_to(updates, data.dtype)
    if updates.rank == 0:
        updates = mb.fill(shape=to_size_vector(get_dims(index)), value=updates)
    elif tuple(updates.shape) != tuple(index.shape):
        updates = mb.slice_by_size(x=updates, begin=[0] * updates.rank, size=to_size_vector(get_dims(index)))
    corner = _slice_corner(data, index, axis, node)
    if corner is not data and not (has_static_shape(corner) and has_static_shape(data)):
        raise NotConverted.at(node, "the index may be smaller than the data, by a dynamic size",
                              "fix the sizes")
    start = corner if include_self else mb.fill(shape=to_size_vector(get_dims(corner)),
                                                value=_get_identity(_SCATTER_MODES[reduce], data.dtype))
    done = mb.scatter_along_axis(data=start, indices=index, updates=updates, axis=axis, mode=_SCATTER_MODES[reduce])
    if reduce == "mean" or not include_self:
        counts = mb.scatter_along_axis(
            data=mb.fill(shape=to_size_vector(get_dims(corner)), value=np.int32(include_self)), indices=index,
            updates=mb.fill(shape=to_size_vector(get_dims(index)), value=np.int32(1)), axis=axis, mode="add")
        if reduce == "mean":
            divide = mb.real_div if types.is_float(data.dtype) else mb.floor_div
            done = divide(x=done, y=cast_to(mb.maximum(x=counts, y=np.int32(1)), data.dtype))
        if not include_self:
            done = mb.select(cond=mb.greater(x=counts, y=np.int32(0)), a=done, b=corner)
    add_result(context, node, cast_to(mb.identity(x=_restore_corner(done, data), name=node.name), entire.dtype))


def _get_identity(mode: str, dtype: Any) -> Any:
    """Return the number of which a scatter in this mode returns the update itself."""
    made = types.nptype_from_builtin(dtype)
    lowest, highest = (-np.inf, np.inf) if types.is_float(dtype) else (np.iinfo(made).min, np.iinfo(made).max)
    return made({"add": 0, "mul": 1, "max": lowest, "min": highest}[mode])


def _slice_corner(x: Var, index: Var, axis: int, node: Any) -> Var:
    """Slice the part of `x` that an index can reach: the sizes of the index along every axis except `axis`."""
    if x.rank != index.rank:
        raise NotConverted.at(node, f"the index has rank {index.rank}, the data rank {x.rank}", "use the same rank "
                                                                                                "for both")
    pairs = [pair for place, pair in enumerate(zip(x.shape, index.shape, strict=True)) if place != axis]
    if all(bool(mine == other) for mine, other in pairs):
        symbols = [mine for mine, _ in pairs if is_symbolic(mine)]
        sources = [(_find_sources(x, symbol), _find_sources(index, symbol)) for symbol in symbols]
        if any(mine and others and mine.isdisjoint(others) for mine, others in sources):
            raise NotConverted.at(node, "the data and the index have an axis of the same flexible size from different "
                                        "inputs: a package does not state that it is the same",
                                  "fix the size, or compute both from one input")
        return x
    size = [-1 if place == axis else other for place, other in enumerate(get_dims(index))]
    return mb.slice_by_size(x=x, begin=[0] * x.rank, size=to_size_vector(size))


def _find_sources(x: Var, symbol: Any) -> set[Var]:
    """Find the inputs with a size of this symbol from which `x` is computed."""
    waiting, seen, found = [x], set(), set()
    while waiting:
        var = waiting.pop()
        if var in seen:
            continue
        seen.add(var)
        if var.op is None and any(symbol == size for size in var.shape):
            found.add(var)
        waiting += get_flat_inputs(var.op) if var.op is not None else []
    return found


def _restore_corner(corner: Var, whole: Var) -> Var:
    """Return `whole` with its corner replaced."""
    for axis in reversed(range(whole.rank)):
        if corner.shape[axis] != whole.shape[axis]:
            begin = [0] * axis + [corner.shape[axis]] + [0] * (whole.rank - axis - 1)
            size = [*corner.shape[:axis], *([-1] * (whole.rank - axis))]
            corner = mb.concat(values=[corner, mb.slice_by_size(x=whole, begin=begin, size=size)], axis=axis)
    return corner


def _cast_bools_to_int(x: Var) -> Var:
    return cast_to(x, types.int32) if x.dtype == types.bool else x
