"""Batches of runs: several runs of a function as one, on inputs concatenated along axis 0.

A function qualifies if each row of its outputs depends only on the same row of its inputs: inputs and outputs have the
same static number of rows, and no op mixes rows. Kernels read sizes from their operands, so the shape of a `reshape` is
the only parameter to adapt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Var

from ..ir.query import get_const_value, get_flat_inputs, get_static_shape, get_type_info
from .quirks.base import Quirk

__all__ = ["BatchedShapes", "can_batch_runs"]

_ELEMENTWISE = frozenset({
    "abs", "acos", "add", "asin", "atan", "cast", "ceil", "clamped_relu", "clip", "cos", "cosh", "elu", "equal",
    "erf", "exp", "exp2", "floor", "floor_div", "gelu", "greater", "greater_equal", "identity", "inverse",
    "leaky_relu", "less", "less_equal", "linear_activation", "log", "logical_and", "logical_not", "logical_or",
    "logical_xor", "maximum", "minimum", "mod", "mul", "not_equal", "pow", "real_div", "relu", "relu6", "round",
    "rsqrt", "scaled_tanh", "select", "sigmoid", "sigmoid_hard", "sign", "silu", "sin", "sinh", "softplus",
    "softsign", "sqrt", "square", "sub", "tan", "tanh", "threshold", "thresholded_relu",
})
"Ops whose operands are broadcast."
_BY_ROW = frozenset({
    "avg_pool", "batch_norm", "conv", "conv_transpose", "depth_to_space", "instance_norm", "l2_pool", "linear",
    "max_pool", "pixel_shuffle", "pixel_unshuffle", "prelu", "softplus_parametric", "space_to_depth",
    "upsample_bilinear", "upsample_nearest_neighbor",
})
"Ops that compute each row of x by itself, with constants for all."


class BatchedShapes(Quirk):
    """Multiplies axis 0 of the shape of a `reshape` by `count`, the number of runs in the batch."""

    name = "batched shapes"
    source = ""
    op_types = ("reshape",)

    def __init__(self, count: int) -> None:
        self._count = count

    def affects(self, op: Any) -> bool:
        return bool(op.op_type == "reshape")

    def operands(self, op: Any, inputs: Any) -> Any:
        # A constant that is reshaped at run time, such as compressed weights, has the rows of one run.
        is_batched = inputs["x"].shape[0] == op.x.shape[0] * self._count if op.x.rank else False
        return _BatchedInputs(inputs, self._count) if is_batched else inputs


class _BatchedInputs:
    """The inputs of a `reshape` with the shape for `count` runs."""

    def __init__(self, inputs: Any, count: int) -> None:
        self._inputs, self._count = inputs, count

    def __getitem__(self, name: str) -> Any:
        return self._inputs[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inputs, name)

    def values(self, name: str) -> list[Any]:
        rows, *others = self._inputs.values(name)
        return [rows * self._count if rows > 0 else rows, *others]


def can_batch_runs(function: Function) -> bool:
    """Return whether runs of `function` can form a batch; False if an op has no rule."""
    inputs = [*function.inputs.values()]
    counts = {_count_rows(var) for var in (*inputs, *function.outputs)}
    if len(counts) != 1 or None in counts or not inputs:
        return False
    (count,) = counts
    computed = set(inputs)
    for op in function.operations:
        if op.op_type == "const":
            continue
        if computed.isdisjoint(get_flat_inputs(op)):
            if op.blocks:
                return False
            continue
        if {_count_rows(var) for var in op.outputs} != {count} or not _treats_rows_alike(op, computed):
            return False
        computed.update(op.outputs)
    return all(var in computed for var in function.outputs)


def _count_rows(var: Var) -> int | None:
    """Return the size of axis 0; None for scalars, dynamic sizes and other types."""
    kind = get_type_info(var)
    if not kind.is_tensor:
        return None
    size = (*(var.shape if kind.shape is None else kind.shape), None)[0]
    return size if isinstance(size, int) else None


def _treats_rows_alike(op: Operation, computed: set[Var]) -> bool:
    """Return whether each row of the results depends only on the same row of the `computed` operands."""
    if op.op_type in _ELEMENTWISE:
        return _broadcasts_alike(op, computed)
    if op.op_type in _BY_ROW:
        return op.x in computed and op.x.rank >= 2 and _reads_only(op, ("x",), computed)
    rule = _RULES.get(op.op_type)
    return rule is not None and rule(op, computed)


def _reads_only(op: Operation, names: Sequence[str], computed: set[Var]) -> bool:
    """Return whether no other operand than those in `names` depends on inputs."""
    own = {id(op.inputs[name]) for name in names}
    return all(id(var) in own or var not in computed for var in get_flat_inputs(op))


def _broadcasts_alike(op: Operation, computed: set[Var]) -> bool:
    """Return whether operands that depend on inputs have the rank of the result, and constants at most one row."""
    rank = op.outputs[0].rank
    rows = _count_rows(op.outputs[0])
    for var in get_flat_inputs(op):
        if var in computed:
            if var.rank != rank or _count_rows(var) != rows:
                return False
        elif var.rank > rank or (var.rank == rank and _count_rows(var) != 1):
            return False
    return True


def _get_axes(op: Operation, name: str, rank: int) -> set[int]:
    """Return the axes of a constant parameter; all axes if it is missing."""
    value = get_const_value(op.inputs.get(name))
    if value is None:
        return set(range(rank))
    return {int(axis) % rank for axis in np.atleast_1d(value)}


def _acts_on_other_axes(parameter: str) -> Callable[[Operation, set[Var]], bool]:
    """Return a rule for ops of x that act along the axes of a parameter, which must not be axis 0."""
    def rule(op: Operation, computed: set[Var]) -> bool:
        return _reads_only(op, ("x",), computed) and 0 not in _get_axes(op, parameter, op.x.rank)
    return rule


def _expands_other_axes(op: Operation, computed: set[Var]) -> bool:
    return 0 not in _get_axes(op, "axes", op.outputs[0].rank)


def _joins_other_axes(op: Operation, computed: set[Var]) -> bool:
    """Accept a concat along another axis; a constant among its values has the rows of one run."""
    return all(var in computed for var in op.values) and 0 not in _get_axes(op, "axis", op.outputs[0].rank)


def _keeps_axis_in_place(op: Operation, computed: set[Var]) -> bool:
    perm = get_const_value(op.perm)
    return perm is not None and int(perm[0]) % op.x.rank == 0


def _keeps_rows_in_shape(op: Operation, computed: set[Var]) -> bool:
    """Accept a reshape in which axis 0 stays as it is."""
    shape, old = get_const_value(op.shape), get_static_shape(op.x)
    return shape is not None and old is not None and len(shape) > 0 and int(shape[0]) != 0 and (
        int(op.outputs[0].shape[0]) == old[0])


def _slices_other_axes(op: Operation, computed: set[Var]) -> bool:
    """Accept a slice that takes all rows, whatever their number."""
    if not _reads_only(op, ("x",), computed):
        return False
    begin, stride = get_const_value(op.begin), get_const_value(op.stride)
    masks = [get_const_value(op.inputs.get(name)) for name in ("begin_mask", "end_mask", "squeeze_mask")]
    starts = (masks[0] is not None and bool(masks[0][0])) or (begin is not None and int(begin[0]) == 0)
    return (starts and masks[1] is not None and bool(masks[1][0]) and (masks[2] is None or not bool(masks[2][0]))
            and (op.stride is None or (stride is not None and int(stride[0]) == 1)))


def _pads_other_axes(op: Operation, computed: set[Var]) -> bool:
    pad = get_const_value(op.pad)
    return pad is not None and _reads_only(op, ("x",), computed) and (
        len(pad) < 2 * op.x.rank or not any(pad[:2]))


def _multiplies_rows(op: Operation, computed: set[Var]) -> bool:
    """Accept a matmul of stacks of matrices; a constant is one matrix, or one stack for all rows."""
    rank = op.outputs[0].rank
    return rank >= 3 and all(
        var.rank == rank if var in computed else var.rank < rank or _count_rows(var) == 1 for var in (op.x, op.y))


def _looks_up(op: Operation, computed: set[Var]) -> bool:
    """Accept rows of a constant table, and constant places along another axis."""
    batch = get_const_value(op.inputs.get("batch_dims"), 0)
    axis = get_const_value(op.axis)
    if axis is None or int(batch) != 0:
        return False
    if op.x not in computed:
        return op.indices in computed and int(axis) % op.x.rank == 0
    return _reads_only(op, ("x",), computed) and int(axis) % op.x.rank != 0


_RULES: dict[str, Callable[[Operation, set[Var]], bool]] = {
    **dict.fromkeys(("layer_norm", "reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum_exp", "reduce_max",
                     "reduce_mean", "reduce_min", "reduce_prod", "reduce_sum", "reduce_sum_square", "reverse",
                     "squeeze"), _acts_on_other_axes("axes")),
    **dict.fromkeys(("argsort", "cumsum", "reduce_argmax", "reduce_argmin", "softmax", "split"),
                    _acts_on_other_axes("axis")),
    "concat": _joins_other_axes,
    "expand_dims": _expands_other_axes,
    "gather": _looks_up,
    "matmul": _multiplies_rows,
    "pad": _pads_other_axes,
    "reshape": _keeps_rows_in_shape,
    "slice_by_index": _slices_other_axes,
    "transpose": _keeps_axis_in_place,
}
