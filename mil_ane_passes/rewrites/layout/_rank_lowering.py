"""Ops on values of high rank, computed on the same elements reshaped to fewer axes.

A planner examines one op and returns either a reason why it cannot be lowered or a function that builds it. That
function gets the builder and `reshape`, which reshapes a value of any rank to few axes. Only the order of elements
matters for the result; its shape is up to the build function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import pairwise, permutations
from math import prod
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import (
    get_const_value,
    get_consumers,
    get_flat_inputs,
    get_reshape_extents,
    is_compressed,
    is_const,
    is_opaque,
    is_symbolic,
    is_used,
)
from ._broadcasts import BROADCASTING_OPS, pad_shape_to_rank

__all__ = ["BITWISE_OPS", "UNARY_OPS", "RankBounds", "build_region", "decompose_permutation", "plan_region"]



class _Product(NamedTuple):
    """A dynamic extent: `number` times the product of the elements at `places` of `operand`, a reshape's `shape`."""

    operand: Var
    places: tuple[int, ...]
    number: int


_Shape = Sequence["int | _Product"]
"Extents to reshape a value to; -1 for one unknown extent, which is inferred."
_ReshapeFunction = Callable[[Var, "_Shape | None"], Var]
"(value, shape or None for any): the value's elements in that shape."
_BuildFunction = Callable[[Any, _ReshapeFunction], "list[Var]"]
UNARY_OPS = (
    "abs", "acos", "asin", "atan", "atanh", "cast", "ceil", "clamped_relu", "clip", "cos", "cosh", "elu", "erf", "exp",
    "exp2", "floor", "gelu", "identity", "inverse", "leaky_relu", "linear_activation", "log", "logical_not", "relu",
    "relu6", "round", "rsqrt", "scaled_tanh", "sigmoid", "sigmoid_hard", "sign", "silu", "sin", "sinh", "softplus",
    "softsign", "sqrt", "square", "tan", "tanh", "threshold", "thresholded_relu",
)
_SLICES = ("slice_by_index", "slice_by_size")
_REDUCE_OPS = ("reduce_max", "reduce_min", "reduce_sum", "reduce_mean", "reduce_prod", "reduce_l1_norm",
               "reduce_l2_norm", "reduce_log_sum", "reduce_log_sum_exp", "reduce_sum_square")
BITWISE_OPS = frozenset({"reshape", "expand_dims", "squeeze", "transpose", "concat", "stack", "split", "slice_by_index",
                         "slice_by_size", "tile", "select", "reduce_max", "reduce_min", *UNARY_OPS, *BROADCASTING_OPS})
"Ops that compute the same bits in any shape."
_Extents = Sequence[int | None]
"Extents of a shape; None for an unknown extent."
_Groups = Sequence[Sequence[int]]
"Groups of axes that become one axis each, in order."
_OPEN_AXIS_SIZE = 1 << 30
"Size that stands in for an unknown extent when the two shortest groups are merged."
_MAX_EXHAUSTIVE_AXES = 7
"Maximum number of axes for which every decomposition into two transposes is tried."


class RankBounds(NamedTuple):
    """Limits: the axes of a value, the extent of an axis, and the transposes that one transpose may become."""

    rank: int
    extent: int
    turns: int


def _plan_op(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    """Plan how to compute `op` with few axes, or return why that is impossible."""
    planner = _PLANNERS.get(op.op_type)
    if planner is None or is_opaque(op):
        return f"{op.op_type} is not known to be equivalent with fewer axes"
    return planner(op, bounds)


def _compute_merged_shape(
    groups: _Groups, sizes: _Extents, bounds: RankBounds, var: Var
) -> list[int | _Product] | str:
    """Compute the shape of groups of axes of `var`, padded to `sizes`, or return why it is impossible."""
    if len(groups) > bounds.rank:
        return f"{len(groups)} axes are treated differently, the limit is {bounds.rank}"
    shape = _compute_extents(groups, sizes, var)
    if shape is None:
        return "more than one dimension is dynamic"
    return _find_long_extent(shape, bounds) or shape


def _find_long_extent(shape: _Shape, bounds: RankBounds) -> str:
    longest = max((extent for extent in shape if isinstance(extent, int)), default=1)
    return f"merged axes would be {longest} long, the limit is {bounds.extent}" if longest > bounds.extent else ""


def _compute_extents(groups: _Groups, sizes: _Extents, var: Var) -> list[int | _Product] | None:
    """Compute the extents of groups of axes of `var`, whose shape is padded in front to `sizes`.

    Several unknown extents are products of elements of the operand `shape` of the reshape that `var` is computed from.
    Return None if there is no such reshape.
    """
    shape = _shape_from_groups(groups, sizes)
    if shape.count(-1) < 2:
        return [*shape]
    source = _find_reshape_sizes(var)
    if source is None:
        return None
    padded = _ReshapeSizes(source.operand, [*[None] * (len(sizes) - var.rank), *source.axes])
    return [_compute_product(group, sizes, padded) for group in groups]


def _compute_own_shape(var: Var) -> list[int | _Product] | None:
    """Compute the shape of `var`; None if several extents are unknown and no reshape determines them."""
    return _compute_extents([[axis] for axis in range(var.rank)], _extents_from_shape(var.shape), var)


def _compute_product(group: Sequence[int], sizes: _Extents, source: _ReshapeSizes) -> int | _Product:
    """Compute the extent of a group of axes from the operand `shape` of a reshape."""
    places = tuple(place for axis in group if (place := source.axes[axis]) is not None)
    if all(sizes[axis] is not None for axis in group):
        return prod(int(sizes[axis] or 0) for axis in group)
    if any(source.known[place] == -1 for place in places):
        return -1
    number = prod(int(sizes[axis] or 0) for axis in group if source.axes[axis] is None)
    return _Product(source.operand, places, number)


def _multiply_extents(extents: _Shape) -> int | _Product:
    """Return the extent of merged axes, which are of one value."""
    if -1 in extents:
        return -1
    number = prod(extent if isinstance(extent, int) else extent.number for extent in extents)
    products = [extent for extent in extents if isinstance(extent, _Product)]
    if not products:
        return number
    return _Product(products[0].operand, tuple(place for each in products for place in each.places), number)


def _plan_reshape(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    return _find_constant_obstacle(op) or (lambda mb, reshape: [reshape(op.x, None)])


def _plan_shape(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    """Plan to read the shape from the operand `shape` of the reshape that the value is computed from."""
    source = _find_reshape_sizes(op.x)
    if source is None:
        return "its dynamic sizes are not elements of the operand 'shape' of a reshape"
    sizes = _extents_from_shape(op.x.shape)
    known = [size if place is None else source.known[place] for size, place in zip(sizes, source.axes)]
    if -1 in known and None in known:
        return "its dynamic sizes are not elements of the operand 'shape' of a reshape"
    if -1 in known:
        return lambda mb, reshape: [_build_sizes(mb, reshape(op.x, None), known)]
    if source.axes == list(range(len(source.known))):
        return lambda mb, reshape: [source.operand]
    if None in source.axes:
        shape = [_compute_product([axis], sizes, source) for axis in range(len(sizes))]
        return lambda mb, reshape: [_build_shape(mb, shape)]
    return lambda mb, reshape: [mb.gather(x=source.operand, indices=np.array(source.axes, np.int32), axis=0)]


def _build_sizes(mb: Any, x: Var, known: Sequence[int | None]) -> Var:
    """Build the shape of a value with the elements of `x`: the sizes in `known`, of which -1 is inferred."""
    count = mb.reduce_prod(x=mb.shape(x=x), axes=[0], keep_dims=True)
    inferred = mb.floor_div(x=count, y=np.int32(-prod(size or 0 for size in known)))
    return mb.concat(values=[
        inferred if size == -1 else mb.const(val=np.array([size], np.int32)) for size in known], axis=0)


class _ReshapeSizes(NamedTuple):
    """The operand `shape` of a reshape, and for each axis of a value the index of its size there.

    One element of the operand may be -1. The index is None for an axis of another size, which is a known number.
    """

    operand: Var
    axes: list[int | None]

    @property
    def known(self) -> list[int | None]:
        return [None if is_symbolic(size) else int(size) for size in self.operand.sym_val]


def _find_reshape_sizes(var: Var) -> _ReshapeSizes | None:
    """Find the sizes of `var` where ops that keep all dynamic sizes compute it from the result of a reshape."""
    axes: list[int | None] = list(range(var.rank))
    while var.op is not None and var.op.op_type != "reshape":
        found = _find_operand_axes(var)
        if found is None:
            return None
        var, kept = found
        axes = [None if axis is None else kept[axis] for axis in axes]
    if var.op is None or var.op.shape.sym_val is None:
        return None
    sizes = _ReshapeSizes(var.op.shape, axes)
    return None if 0 in sizes.known else sizes


def _find_operand_axes(var: Var) -> tuple[Var, list[int | None]] | None:
    """Find an operand that has all dynamic sizes of `var`, and for each axis of `var` the axis of equal size there.

    Equal symbols are equal sizes. An axis of another size, which is a known number, has None.
    """
    op = var.op
    for operand in get_flat_inputs(op):
        axes = list(range(operand.rank))
        if op.op_type == "transpose":
            axes = [int(axis) % operand.rank for axis in get_const_value(op.perm, [])]
        elif op.op_type in _SLICES and operand is op.x:
            return _find_sliced_axes(op)
        elif operand.rank > var.rank:  # the op removes axes
            removed = {int(axis) % operand.rank for axis in get_const_value(op.inputs.get("axes"), [])}
            axes = [axis for axis in axes if axis not in removed]
        if len(axes) == var.rank and all(
                size == operand.shape[axis] or not is_symbolic(size) for size, axis in zip(var.shape, axes)):
            return operand, [axis if size == operand.shape[axis] else None for size, axis in zip(var.shape, axes)]
    return None


def _find_sliced_axes(op: Operation) -> tuple[Var, list[int | None]] | None:
    """Find the operand of a slice that reads all dynamic axes entirely; coremltools gives them other symbols."""
    if _find_slice_obstacle(op):
        return None
    sizes = _extents_from_shape(op.x.shape)
    removed = get_const_value(op.inputs.get("squeeze_mask")) or [False] * op.x.rank
    axes = [axis if _read_slice_range(op, axis, size) is None else None for axis, size in enumerate(sizes)]
    if any(size is None and axis is None for size, axis in zip(sizes, axes)):
        return None
    return op.x, [axis for axis, is_removed in zip(axes, removed) if not is_removed]


def _find_only_tensor(op: Operation) -> str | None:
    """Return the name of the operand that has a rank, if the others are numbers."""
    tensors = [name for name in ("cond", "a", "b", "x", "y") if name in op.inputs and op.inputs[name].rank]
    return tensors[0] if len(tensors) == 1 else None


def _plan_unary(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    return _find_constant_obstacle(op) or (lambda mb, reshape: [rebuild_op(mb, op, x=reshape(op.x, None))])


def _find_constant_obstacle(op: Operation) -> str:
    return "its operand is a constant" if is_const(op.x) or is_compressed(op.x) else ""


def _isolate_axis(x: Var, axis: int, bounds: RankBounds) -> tuple[list[int | _Product], int] | str:
    """Return a shape of `x` with all axes before `axis` merged, and all after it, and the new position of `axis`."""
    axis %= x.rank
    sizes = _extents_from_shape(x.shape)
    keys = [None if size == 1 and at != axis else (at > axis) - (at < axis) for at, size in enumerate(sizes)]
    groups = _group_axes(keys, sizes, bounds.rank)
    shape = _compute_merged_shape(groups, sizes, bounds, x)
    return shape if isinstance(shape, str) else (shape, _find_group_of_axis(groups, axis))


def _find_group_of_axis(groups: _Groups, axis: int) -> int:
    return next(at for at, group in enumerate(groups) if axis in group)


def _plan_softmax(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    found = _isolate_axis(op.x, int(op.axis.val), bounds)
    if isinstance(found, str):
        return found
    return lambda mb, reshape: [rebuild_op(mb, op, x=reshape(op.x, found[0]), axis=found[1])]


def _plan_layer_norm(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    axes = {int(axis) % op.x.rank for axis in get_const_value(op.axes, list(range(op.x.rank)))}
    sizes = _extents_from_shape(op.x.shape)
    # gamma and beta have the normalized axes, which stay as they are.
    keys = [at if at in axes else None if size == 1 else -1 for at, size in enumerate(sizes)]
    groups = _group_axes(keys, sizes, bounds.rank)
    shape = _compute_merged_shape(groups, sizes, bounds, op.x)
    if isinstance(shape, str):
        return shape
    over = [at for at, group in enumerate(groups) if axes.intersection(group)]
    if len(over) < len(axes):
        return "normalized axes would be merged"
    return lambda mb, reshape: [rebuild_op(mb, op, x=reshape(op.x, shape), axes=over)]


def _plan_split(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    found = _isolate_axis(op.x, int(op.axis.val), bounds)
    if isinstance(found, str):
        return found
    kept = {name: var for name, var in op.inputs.items() if name in ("num_splits", "split_sizes")}
    return lambda mb, reshape: list(mb.split(x=reshape(op.x, found[0]), axis=found[1], **kept))


def _plan_concat(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    if get_const_value(op.inputs.get("interleave"), False):
        return "the concat interleaves"
    found = [_isolate_axis(var, int(op.axis.val), bounds) for var in op.values]
    return _plan_join(op, found)


def _plan_stack(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    axis = int(op.axis.val) % op.outputs[0].rank
    found = []
    for var in op.values:
        sizes = _extents_from_shape(var.shape)
        keys = [None if size == 1 else at >= axis for at, size in enumerate(sizes)]
        groups = _group_axes(keys, sizes, bounds.rank - 1)
        shape = _compute_merged_shape(groups, sizes, bounds._replace(rank=bounds.rank - 1), var)
        at = sum(any(keys[each] is False for each in group) for group in groups)
        found.append(shape if isinstance(shape, str) else ([*shape[:at], 1, *shape[at:]], at))
    return _plan_join(op, found)


def _plan_join(op: Operation, found: Sequence[tuple[list[int | _Product], int] | str]) -> _BuildFunction | str:
    fits: list[tuple[list[int | _Product], int]] = []
    for each in found:
        if isinstance(each, str):
            return each
        fits.append(each)
    if len({(at, len(shape), *shape[:at], *shape[at + 1:]) for shape, at in fits}) > 1:
        return "the concatenated values fall into different axes"
    return lambda mb, reshape: [mb.concat(values=[reshape(var, shape) for var, (shape, _) in zip(op.values, fits)],
                                       axis=fits[0][1])]


def _plan_reduce(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    axes = {int(axis) % op.x.rank for axis in get_const_value(op.axes, list(range(op.x.rank)))}
    sizes = _extents_from_shape(op.x.shape)
    keys = [None if size == 1 and at not in axes else at in axes for at, size in enumerate(sizes)]
    groups = _group_axes(keys, sizes, bounds.rank)
    shape = _compute_merged_shape(groups, sizes, bounds, op.x)
    if isinstance(shape, str):
        return shape
    over = [at for at, group in enumerate(groups) if axes.intersection(group)]
    return lambda mb, reshape: [rebuild_op(mb, op, x=reshape(op.x, shape), axes=over, keep_dims=True)]


def _plan_tile(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    reps = get_const_value(op.reps)
    if reps is None:
        return "repeats are not constant"
    sizes = _extents_from_shape(op.x.shape)
    keys = [(at if times != 1 else None if size == 1 else -1) for at, (times, size) in enumerate(zip(reps, sizes))]
    groups = _group_axes(keys, sizes, bounds.rank)
    shape = _compute_merged_shape(groups, sizes, bounds, op.x)
    if isinstance(shape, str):
        return shape
    times = [int(np.prod([reps[axis] for axis in group])) for group in groups]
    return lambda mb, reshape: [mb.tile(x=reshape(op.x, shape), reps=np.array(times, np.int32))]


def _plan_elementwise(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    only = _find_only_tensor(op)
    if only is not None and not is_compressed(op.inputs[only]):
        return lambda mb, reshape: [rebuild_op(mb, op, **{only: reshape(op.inputs[only], None)})]
    names = ("cond", "a", "b") if op.op_type == "select" else ("x", "y")
    found = _merge_broadcast_shapes({name: op.inputs[name] for name in names}, op.outputs[0].shape, bounds)
    if isinstance(found, str):
        return found

    ranked = sorted((op.inputs[name] for name in found), key=is_const)  # the first is computed, if any is
    alike = len({tuple(map(str, var.shape)) for var in ranked}) == 1

    def build_lowered(mb: Any, reshape: _ReshapeFunction) -> list[Var]:
        own = get_reshape_extents(reshape(ranked[0], None).shape)
        same = own if alike and own.count(-1) < 2 else None  # no broadcast: any shape of the first is suitable
        return [rebuild_op(mb, op, **{name: reshape(op.inputs[name], same or shape) for name, shape in found.items()})]

    return build_lowered


def _merge_broadcast_shapes(
    operands: dict[str, Var], output: Sequence[Any], bounds: RankBounds
) -> dict[str, list[int | _Product]] | str:
    """Compute the shape of each operand that has a rank, so that they broadcast as before."""
    shapes = {name: pad_shape_to_rank(var.shape, len(output)) for name, var in operands.items() if var.rank}
    if any(is_compressed(var) for var in operands.values()):
        return "an operand is a compressed weight"
    keys: list[Any] = []
    for axis, extent in enumerate(output):
        extents = [shape[axis] for shape in shapes.values()]
        if len({str(each) for each in extents if each != 1}) > 1 or (is_symbolic(extent) and extent not in extents):
            return "whether a dynamic dimension broadcasts is unknown"
        keys.append(None if all(each == 1 for each in extents) else tuple(each == 1 for each in extents))
    groups = _group_axes(keys, _extents_from_shape(output), bounds.rank)
    result: dict[str, list[int | _Product]] = {}
    for name, padded in shapes.items():
        shape = _compute_merged_shape(groups, _extents_from_shape(padded), bounds, operands[name])
        if isinstance(shape, str):
            return shape
        result[name] = shape
    return result


def _plan_matmul(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    if min(op.x.rank, op.y.rank) < 2:
        return "an operand of the product is a vector"
    if any(is_compressed(var) and var.rank > 2 for var in (op.x, op.y)):
        return "an operand is a compressed weight"
    rank = op.outputs[0].rank
    batches = {name: pad_shape_to_rank(op.inputs[name].shape, rank)[:-2] for name in ("x", "y")}
    keys = []
    for one, other in zip(*batches.values()):
        if one != other and 1 not in (one, other):
            return "whether a dynamic dimension broadcasts is unknown"
        keys.append(None if one == other == 1 else (one == 1, other == 1))
    groups = _group_axes(keys, _extents_from_shape(op.outputs[0].shape[:-2]), bounds.rank - 2) if keys else []
    shapes: dict[str, list[int | _Product]] = {}
    for name, batch in batches.items():
        var = op.inputs[name]
        if var.rank == 2:
            continue
        sizes = _extents_from_shape((*batch, *var.shape[-2:]))
        shape = _compute_merged_shape([*groups, [rank - 2], [rank - 1]], sizes, bounds, var)
        if isinstance(shape, str):
            return shape
        shapes[name] = shape
    return lambda mb, reshape: [
        rebuild_op(mb, op, **{name: reshape(op.inputs[name], shape) for name, shape in shapes.items()})
    ]


def _plan_linear(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    found = _isolate_axis(op.x, -1, bounds._replace(rank=3))
    if isinstance(found, str):
        return found
    return lambda mb, reshape: [rebuild_op(mb, op, x=reshape(op.x, found[0]))]


def _plan_transpose(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    sizes = _extents_from_shape(op.x.shape)
    groups, steps = _plan_transposes([int(axis) % op.x.rank for axis in get_const_value(op.perm)], sizes, bounds.rank)
    if len(steps) > bounds.turns:
        return f"{len(steps)} transposes of rank {bounds.rank} would be needed, the limit is {bounds.turns}"
    extents = _compute_extents(groups, sizes, op.x)
    if extents is None:
        return "more than one dimension is dynamic"
    plans: list[tuple[list[int | _Product], list[int]]] = []
    for step in steps:
        known = [extent if isinstance(extent, int) and extent != -1 else None for extent in extents]
        merged, (order,) = _plan_transposes(step, known, bounds.rank)
        shape = [_multiply_extents([extents[axis] for axis in group]) for group in merged]
        if obstacle := _find_long_extent(shape, bounds):
            return obstacle
        plans.append((shape, order))
        extents = [extents[axis] for axis in step]

    def build_lowered(mb: Any, reshape: _ReshapeFunction) -> list[Var]:
        x = op.x
        for shape, order in plans:
            x = reshape(x, shape if order != sorted(order) else None)
            x = mb.transpose(x=x, perm=order) if order != sorted(order) else x
        return [x]

    return build_lowered


def _plan_slice(op: Operation, bounds: RankBounds) -> _BuildFunction | str:
    if obstacle := _find_slice_obstacle(op):
        return obstacle
    sizes = _extents_from_shape(op.x.shape)
    ranges = [_read_slice_range(op, axis, size) for axis, size in enumerate(sizes)]
    keys = [axis if each is not None else None if sizes[axis] == 1 else -1 for axis, each in enumerate(ranges)]
    groups = _group_axes(keys, sizes, bounds.rank)
    shape = _compute_merged_shape(groups, sizes, bounds, op.x)
    if isinstance(shape, str):
        return shape
    if any(each is not None and sizes[axis] is None for axis, each in enumerate(ranges)):
        return "a dynamic dimension is sliced"
    cut = [next((ranges[axis] for axis in group if ranges[axis] is not None), None) for group in groups]
    parameters = {
        "begin": [each.start if each else 0 for each in cut],
        "end": [each.stop if each else 0 for each in cut],
        "stride": [each.step if each else 1 for each in cut],
        "begin_mask": [each is None for each in cut],
        "end_mask": [each is None or each.stop < 0 for each in cut],  # backwards to the first element
    }
    return lambda mb, reshape: [mb.slice_by_index(x=reshape(op.x, shape), **parameters)]


def _find_slice_obstacle(op: Operation) -> str:
    names = ("begin", "size") if op.op_type == "slice_by_size" else ("begin", "end")
    return "the slice is not constant" if any(get_const_value(op.inputs[name]) is None for name in names) else ""


def _read_slice_range(op: Operation, axis: int, size: int | None) -> range | None:
    """Return the indices that are read of an axis; None for all of them.

    For an axis of unknown size that is cut, return an empty range: it is not examined further.
    """
    begin = int(get_const_value(op.begin)[axis])
    if op.op_type == "slice_by_size":
        count = int(get_const_value(op.size)[axis])
        if size is None:
            return None if begin == 0 and count == -1 else range(0)
        begin += size if begin < 0 else 0
        indices = range(begin, size if count == -1 else begin + count)
        return None if indices == range(size) else indices
    squeezed, from_front, to_end = (bool((get_const_value(op.inputs.get(name)) or [False] * op.x.rank)[axis])
                                    for name in ("squeeze_mask", "begin_mask", "end_mask"))
    step = int((get_const_value(op.inputs.get("stride")) or [1] * op.x.rank)[axis])
    if size is None:
        return None if (from_front or begin == 0) and to_end and step == 1 and not squeezed else range(0)
    if squeezed:
        index = 0 if from_front else begin % size
        indices = range(index, index + 1)
    else:
        end = int(get_const_value(op.end)[axis])
        indices = range(size)[slice(None if from_front else begin, None if to_end else end, step)]
    return None if indices == range(size) else indices


_PLANNERS: dict[str, Callable[[Operation, RankBounds], _BuildFunction | str]] = {
    **dict.fromkeys(UNARY_OPS, _plan_unary),
    **dict.fromkeys(BROADCASTING_OPS, _plan_elementwise),
    **dict.fromkeys(_REDUCE_OPS, _plan_reduce),
    **dict.fromkeys(("reshape", "expand_dims", "squeeze"), _plan_reshape),
    "select": _plan_elementwise,
    "shape": _plan_shape,
    "softmax": _plan_softmax,
    "layer_norm": _plan_layer_norm,
    "split": _plan_split,
    "concat": _plan_concat,
    "stack": _plan_stack,
    "tile": _plan_tile,
    "matmul": _plan_matmul,
    "linear": _plan_linear,
    "transpose": _plan_transpose,
    **dict.fromkeys(_SLICES, _plan_slice),
}


def _extents_from_shape(shape: Sequence[object]) -> list[int | None]:
    """Return the extents of a shape, None for each that is symbolic."""
    return [None if is_symbolic(extent) else int(str(extent)) for extent in shape]


def _group_axes(keys: Sequence[Hashable], sizes: _Extents, most: int) -> list[list[int]]:
    """Merge neighbouring axes with equal keys, the shortest first, until at most `most` groups are left.

    An axis with the key None (of extent 1, along which nothing is computed) joins its neighbour. More groups than
    `most` may be left where keys differ.
    """
    named: list[Hashable] = []
    groups: list[list[int]] = []
    for axis, key in enumerate(keys):
        if key is None and groups:
            groups[-1].append(axis)
        elif groups and named[-1] is None:
            groups[-1].append(axis)
            named[-1] = key
        else:
            groups.append([axis])
            named.append(key)
    while len(groups) > most:
        pairs = [at for at in range(len(groups) - 1) if named[at] == named[at + 1]]
        if not pairs:
            break
        _join_neighbors(groups, min(pairs, key=lambda at: _compute_size([*groups[at], *groups[at + 1]], sizes)))
        named = [_find_group_key(group, keys) for group in groups]
    # Dynamic groups that are treated alike become one group, whose extent is inferred.
    opened = [at for at, group in enumerate(groups) if any(sizes[axis] is None for axis in group)]
    for first, last in reversed(list(pairwise(opened))):
        if len(set(named[first:last + 1])) == 1:
            groups[first:last + 1] = [[axis for group in groups[first:last + 1] for axis in group]]
    return groups


def _find_group_key(group: Sequence[int], keys: Sequence[Hashable]) -> Hashable:
    """Return the key of a group: that of its axes which have one."""
    return next((keys[axis] for axis in group if keys[axis] is not None), None)


def _join_neighbors(groups: list[list[int]], at: int) -> None:
    groups[at:at + 2] = [[*groups[at], *groups[at + 1]]]


def _compute_size(axes: Sequence[int], sizes: _Extents) -> int:
    return prod(_OPEN_AXIS_SIZE if sizes[axis] is None else int(sizes[axis] or 0) for axis in axes)


def _shape_from_groups(groups: _Groups, sizes: _Extents) -> list[int]:
    """Return the extents of the groups, -1 for each unknown extent."""
    return [-1 if any(sizes[axis] is None for axis in group) else prod(int(sizes[axis] or 0) for axis in group)
            for group in groups]


def _build_shape(mb: Any, shape: _Shape) -> Var:
    """Build the operand `shape` of a reshape, int32 [rank], from constants and products."""
    parts = []
    for extent in shape:
        if isinstance(extent, int):
            parts.append(mb.const(val=np.array([extent], np.int32)))
            continue
        part = mb.gather(x=extent.operand, indices=np.array(extent.places, np.int32), axis=0)
        part = mb.reduce_prod(x=part, axes=[0], keep_dims=True) if len(extent.places) > 1 else part
        parts.append(mb.mul(x=part, y=np.int32(extent.number)) if extent.number != 1 else part)
    return mb.concat(values=parts, axis=0)


def _plan_transposes(perm: Sequence[int], sizes: _Extents, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """Split a transpose into groups of input axes that stay together, and one order of the groups for each transpose.

    Each order permutes the result of the previous transpose. With merged axes, none needs a rank above `most`.
    """
    groups = [[axis] for axis in range(len(perm)) if sizes[axis] != 1]
    places = {axis: place for place, axis in enumerate(axis for axis in perm if sizes[axis] != 1)}
    while len(groups) > most:
        pairs = [at for at in range(len(groups) - 1) if places[groups[at][-1]] + 1 == places[groups[at + 1][0]]]
        if not pairs:
            break
        _join_neighbors(groups, min(pairs, key=lambda at: _compute_size([*groups[at], *groups[at + 1]], sizes)))
    order = sorted(range(len(groups)), key=lambda at: places[groups[at][0]])
    return groups, [list(step) for step in decompose_permutation(tuple(order), most)]


@cache
def decompose_permutation(order: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    """Return transposes that produce `order` when applied in sequence.

    Each has at most `most` axes once the axes that stay together are merged.
    """
    if _count_merged_axes(order) <= most:
        return (order,)
    if len(order) <= _MAX_EXHAUSTIVE_AXES:
        for first in permutations(range(len(order))):
            second = tuple(first.index(axis) for axis in order)
            if _count_merged_axes(first) <= most and _count_merged_axes(second) <= most:
                return first, second
    steps, now = [], list(range(len(order)))
    for place in range(len(order)):
        at, run = now.index(order[place]), 1
        while place + run < len(order) and at + run < len(now) and now[at + run] == order[place + run]:
            run += 1
        if at != place:
            step = [*range(place), *range(at, at + run), *range(place, at), *range(at + run, len(now))]
            steps.append(tuple(step))
            now = [now[axis] for axis in step]
    return tuple(steps)


def _count_merged_axes(order: Sequence[int]) -> int:
    """Count the axes of a transpose once those that stay neighbours are merged."""
    return 1 + sum(after != before + 1 for before, after in pairwise(order))


def plan_region(
    block: Block, ops: Sequence[Operation], bounds: RankBounds
) -> list[tuple[Operation, _BuildFunction]] | str:
    """Plan how to build each op of a region with few axes, or return why the region is not rewritten."""
    reason = _find_region_obstacle(block, ops, bounds.rank)
    if reason:
        return reason
    plans: list[tuple[Operation, _BuildFunction]] = []
    for op in ops:
        plan = _plan_op(op, bounds)
        if isinstance(plan, str):
            return f"{op.op_type} '{op.outputs[0].name if op.outputs else op.name}': {plan}"
        plans.append((op, plan))
    return plans


def build_region(mb: RewriteBuilder, plans: Sequence[tuple[Operation, _BuildFunction]], most: int) -> dict[Var, Var]:
    """Build the region with `most` axes at most; return the replacement of each value that leaves it."""
    lowered: dict[Var, Var] = {}
    reshaped: dict[tuple[Var, tuple[int | _Product, ...]], Var] = {}

    def reshape_value(var: Var, shape: _Shape | None) -> Var:
        value = lowered.get(var, var)
        if shape is None or list(shape) == get_reshape_extents(value.shape):
            return value
        numbers = [extent for extent in shape if isinstance(extent, int)]
        if is_const(value):  # whose sizes are known
            return mb.reshaped(value, tuple(numbers))
        key = (value, tuple(shape))
        if key not in reshaped:
            operand = np.array(numbers, np.int32) if numbers == list(shape) else _build_shape(mb, shape)
            reshaped[key] = mb.reshape(x=value, shape=operand)
        return reshaped[key]

    replaced: dict[Var, Var] = {}
    for op, build in plans:
        with mb.at(op):
            for old, new in zip(op.outputs, build(mb, reshape_value)):
                lowered[old] = new
                if old.rank > most:
                    continue
                lowered[old] = replaced[old] = (
                    mb.reshape(x=new, shape=op.shape) if _is_reshape_by_operand(op) else
                    reshape_value(new, _compute_own_shape(old)))
    return replaced


def _is_reshape_by_operand(op: Operation) -> bool:
    """Return True for a reshape to several dynamic sizes, whose operand `shape` does not infer a known size (-1)."""
    if op.op_type != "reshape" or get_reshape_extents(op.outputs[0].shape).count(-1) < 2:
        return False
    source = _find_reshape_sizes(op.outputs[0])
    return source is not None and not any(
        extent == -1 and not is_symbolic(size) for extent, size in zip(source.known, op.outputs[0].shape))


def _find_region_obstacle(block: Block, ops: Sequence[Operation], most: int) -> str:
    """Return why the region cannot be rewritten, such as a high-rank value that is visible outside of it; else ""."""
    entering = set(block.inputs.values() if isinstance(block, Function) else block.inputs)
    for op in ops:
        if any(types.is_list(var.sym_type) for var in (*op.outputs, *get_flat_inputs(op))):
            return f"{op.op_type} '{op.outputs[0].name}' works on a list"
        if not any(var.rank <= most or is_used(var) for var in op.outputs):
            return f"nothing reads '{op.outputs[0].name}'"
        for var in op.outputs:
            if var.rank > most and var.consuming_blocks:
                return f"'{var.name}' of rank {var.rank} is an output"
            if var.rank > most and any(reader.enclosing_block is not block for reader in get_consumers(var)):
                return f"'{var.name}' of rank {var.rank} is used in a nested block"
            if var.rank <= most and _compute_own_shape(var) is None:
                return f"more than one dimension of '{var.name}' is dynamic"
        for var in get_flat_inputs(op):
            if var.rank > most and (var in entering or (var.op is not None and var.op.enclosing_block is not block)):
                return f"'{var.name}' of rank {var.rank} comes from outside"
    return ""
