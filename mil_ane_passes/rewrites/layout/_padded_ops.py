"""Ops on rows with padding at the end: elementwise ops, and ops on other axes than the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.query import get_const_value, is_const, is_opaque
from ..convolution._conv_1d_lifting import rebuild_op
from ._padded_products import plan_product, plan_row_sum
from ._row_padding import UNBOUNDED, PaddedStep, RowPadding

__all__ = ["plan_padded_op"]

_SHRINKING_OPS = ("abs", "atan", "cast", "gelu", "identity", "relu", "relu6", "silu", "sin", "softsign", "tanh",
                  "thresholded_relu")
"|f(x)| <= |x|."
_UNIT_BOUNDED_OPS = ("cos", "sigmoid", "sigmoid_hard", "sign")
"|f(x)| <= 1."
_ZERO_PRESERVING_OPS = (
    "asin",
    "atanh",
    "ceil",
    "elu",
    "erf",
    "floor",
    "leaky_relu",
    "round",
    "sinh",
    "sqrt",
    "square",
    "tan",
)
"f(0) = 0; elsewhere a small input may give a large or undefined value."
_SMALL_AT_ZERO_OPS = ("acos", "cosh", "exp", "exp2", "softplus")
"|f(0)| < 2; elsewhere as for `_ZERO_PRESERVING_OPS`."
_OTHER_UNARY_OPS = (
    "batch_norm",
    "clamped_relu",
    "clip",
    "inverse",
    "linear_activation",
    "log",
    "prelu",
    "rsqrt",
    "scaled_tanh",
    "softplus_parametric",
    "threshold",
)
_UNARY_OPS = frozenset(
    (*_SHRINKING_OPS, *_UNIT_BOUNDED_OPS, *_ZERO_PRESERVING_OPS, *_SMALL_AT_ZERO_OPS, *_OTHER_UNARY_OPS)
)
_DIVISION_OPS = ("real_div", "floor_div", "mod", "pow")
_BINARY_OPS = ("add", "sub", "mul", "maximum", "minimum", *_DIVISION_OPS)
_REDUCTION_OPS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min")
_MAX_FINITE_REACH = 16384.0
"Largest magnitude of a padding that counts as finite in fp16, sums included."

PaddingReaches = Mapping[Var, float]
"The largest magnitude in the padding of each value that is computed padded."


def plan_padded_op(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan how `op` is carried on padded rows; None where it cannot be carried."""
    if is_opaque(op) or op.blocks:
        return None
    if op.op_type in ("matmul", "linear"):
        return plan_product(op, rows, reaches)
    known = _PLANNERS.get(op.op_type)
    if known is None or not all(rows.extent(var) for var in op.outputs):
        return plan_row_sum(op, rows, reaches) if op.op_type.startswith("reduce_") else None
    step = known(op, rows, reaches)
    if step is None or step.reach <= _MAX_FINITE_REACH:
        return step
    return PaddedStep(step.takes, step.padded_outputs, step.build, UNBOUNDED, step.constants, step.exact)


def _plan_on_x(op: Operation, reach: float, *, exact: bool = True, **changes: Any) -> PaddedStep:
    def build(mb: Any, wide: Callable[[Var], Var]) -> Any:
        return rebuild_op(mb, op, x=wide(op.x), **changes)

    return PaddedStep((op.x,), tuple(op.outputs), build, reach, exact=exact)


def _plan_unary(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    if rows.extent(op.x) is None or (op.op_type in ("batch_norm", "prelu", "softplus_parametric") and op.x.rank < 3):
        return None
    reach = reaches.get(op.x, 0.0)
    if op.op_type in _UNIT_BOUNDED_OPS and reach < UNBOUNDED:
        return _plan_on_x(op, 1.0)
    if op.op_type in _SHRINKING_OPS:
        return _plan_on_x(op, reach)
    if reach == 0 and op.op_type in (*_ZERO_PRESERVING_OPS, *_SMALL_AT_ZERO_OPS):
        return _plan_on_x(op, 0.0 if op.op_type in _ZERO_PRESERVING_OPS else 2.0)
    return _plan_on_x(op, UNBOUNDED)


def _plan_binary(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    x = _read_operand(op.x, op, rows, reaches)
    y = _read_operand(op.y, op, rows, reaches, fill=1.0 if op.op_type in _DIVISION_OPS else 0.0)
    return _plan_operands(op, {"x": x, "y": y}, _combine_reaches(op, x, y), rows)


def _combine_reaches(op: Operation, x: _Operand | None, y: _Operand | None) -> float:
    one, other = (UNBOUNDED if each is None else each.reach for each in (x, y))
    if UNBOUNDED in (one, other):
        return UNBOUNDED
    if op.op_type in ("add", "sub"):
        return one + other
    if op.op_type == "mul":
        return one * other
    if op.op_type in ("maximum", "minimum"):
        return max(one, other)
    padded_by_one = op.op_type == "real_div" and is_const(op.y) and op.y.rank and int(op.y.shape[-1]) > 1
    return one if padded_by_one else UNBOUNDED


class _Operand:
    """An input of an elementwise op: read padded, padded as a const, or read unchanged."""

    def __init__(self, var: Var, reach: float, wide: int | None = None, fill: float = 0.0) -> None:
        self.var, self.reach, self.wide, self.fill = var, reach, wide, fill

    @property
    def taken(self) -> bool:
        return self.wide is not None and not is_const(self.var)


def _read_operand(
    var: Var, op: Operation, rows: RowPadding, reaches: PaddingReaches, fill: float = 0.0
) -> _Operand | None:
    """Read an input of an elementwise op; None where it can be read neither padded nor unchanged."""
    if not var.rank or to_fixed_extent(var.shape[-1]) == 1:
        return _Operand(var, _find_largest_magnitude(var))
    if to_fixed_extent(var.shape[-1]) != int(op.outputs[0].shape[-1]):
        return None
    wide = rows.extent(op.outputs[0])
    if is_const(var):
        return _Operand(var, fill, wide, fill)
    return (
        None if rows.extent(var) is None or _is_compressed_weight(var) else _Operand(var, reaches.get(var, 0.0), wide)
    )


def to_fixed_extent(extent: Any) -> int | None:
    """Return a fixed extent as a number; None for a symbolic one."""
    return int(extent) if isinstance(extent, (int, np.integer)) else None


def _find_largest_magnitude(var: Var) -> float:
    """Return the largest magnitude of a const; `UNBOUNDED` for a const that is not finite, and for a dynamic value."""
    if not is_const(var):
        return UNBOUNDED
    found = float(np.max(np.abs(np.asarray(var.val, np.float64)), initial=0.0))
    return found if np.isfinite(found) else UNBOUNDED


def _is_compressed_weight(var: Var) -> bool:
    return var.op is not None and var.op.op_type.startswith("constexpr_")


def _plan_operands(
    op: Operation, given: dict[str, _Operand | None], reach: float, rows: RowPadding
) -> PaddedStep | None:
    operands = {name: each for name, each in given.items() if each is not None}
    if len(operands) < len(given) or not any(each.wide for each in operands.values()):
        return None

    def build(mb: Any, wide: Callable[[Var], Var]) -> Any:
        changed = {}
        for name, each in operands.items():
            if each.taken:
                changed[name] = wide(op.inputs[name])
            elif each.wide is not None:
                changed[name] = rows.pad_const(mb, each.var, {-1: each.wide}, each.fill)
        return rebuild_op(mb, op, **changed)

    constants = sum(rows.count_padded_bytes(each.var, {-1: each.wide}) for each in operands.values() if each.wide)
    return PaddedStep(
        tuple(each.var for each in operands.values() if each.taken), tuple(op.outputs), build, reach, constants
    )


def _plan_select(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    given = {name: _read_operand(op.inputs[name], op, rows, reaches) for name in ("cond", "a", "b")}
    values = [each.reach for name, each in given.items() if each is not None and name != "cond"]
    return _plan_operands(op, given, max(values, default=UNBOUNDED), rows)


def _plan_transpose(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    perm = get_const_value(op.perm)
    return None if perm is None or perm[-1] % op.x.rank != op.x.rank - 1 else _plan_on_x(op, reaches.get(op.x, 0.0))


def _plan_axis_change(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan an expand_dims or squeeze that keeps the last axis the last."""
    axes = get_const_value(op.axes)
    longer = op.x if op.op_type == "squeeze" else op.outputs[0]
    if axes is None or rows.extent(op.x) is None or any(axis % longer.rank == longer.rank - 1 for axis in axes):
        return None
    return _plan_on_x(op, reaches.get(op.x, 0.0))


def _plan_reshape(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan a reshape that keeps the last extent: rows stay rows, as the elements keep their order."""
    shape = get_const_value(op.shape)
    if shape is None or rows.extent(op.x) is None or int(op.x.shape[-1]) != int(op.outputs[0].shape[-1]):
        return None
    wide = rows.extent(op.outputs[0])
    return _plan_on_x(op, reaches.get(op.x, 0.0), shape=np.array([*shape[:-1], wide], np.int32))


def _plan_join(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan a concat or stack on another axis than the last."""
    rank, wide = op.outputs[0].rank, rows.extent(op.outputs[0])
    if (
        get_const_value(op.axis) is None
        or get_const_value(op.axis) % rank == rank - 1
        or wide is None
        or any(map(_is_compressed_weight, op.values))
    ):
        return None
    taken = tuple(dict.fromkeys(var for var in op.values if not is_const(var)))
    if any(rows.extent(var) is None for var in taken):
        return None

    def build(mb: Any, wider: Callable[[Var], Var]) -> Any:
        return rebuild_op(mb, op, values=[
            rows.pad_const(mb, var, {-1: wide}) if is_const(var) else wider(var) for var in op.values])

    constants = sum(rows.count_padded_bytes(var, {-1: wide}) for var in op.values)
    return PaddedStep(taken, tuple(op.outputs), build, max(reaches.get(var, 0.0) for var in op.values), constants)


def _plan_split(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    axis = get_const_value(op.axis)
    if axis is None or axis % op.x.rank == op.x.rank - 1 or rows.extent(op.x) is None:
        return None
    return PaddedStep((op.x,), tuple(op.outputs), lambda mb, wide: mb.split(**{**op.inputs, "x": wide(op.x)}),
                      reaches.get(op.x, 0.0))


def _plan_slice(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan a slice of other axes that keeps all of the last one."""
    names = ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")
    given = {name: get_const_value(op.inputs.get(name)) for name in names}
    if any(op.inputs.get(name) is not None and given[name] is None for name in names) or rows.extent(op.x) is None:
        return None
    width, last = int(op.x.shape[-1]), {name: each[-1] for name, each in given.items() if each is not None}
    from_front = last.get("begin_mask", False) or last["begin"] in (0, -width)
    to_end = last.get("end_mask", False) or last["end"] >= width
    if not from_front or not to_end or last.get("stride", 1) != 1 or last.get("squeeze_mask", False):
        return None
    masks: dict[str, Any] = {name: [*(given[name] or [False] * op.x.rank)[:-1], True]
                             for name in ("begin_mask", "end_mask")}
    return _plan_on_x(op, reaches.get(op.x, 0.0), **masks)


def _plan_softmax(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan a softmax of another axis: the elements of a row are independent."""
    if get_const_value(op.axis) is None or get_const_value(op.axis) % op.x.rank == op.x.rank - 1:
        return None
    return _plan_on_x(op, 1.0 if reaches.get(op.x, 0.0) < UNBOUNDED else UNBOUNDED, exact=False)


def _plan_reduce(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan a reduction of other axes than the last."""
    axes = get_const_value(op.axes)
    if not axes or any(axis % op.x.rank == op.x.rank - 1 for axis in axes) or rows.extent(op.x) is None:
        return plan_row_sum(op, rows, reaches)
    reach = reaches.get(op.x, 0.0)
    return _plan_on_x(op, UNBOUNDED if op.op_type == "reduce_sum" and reach else reach, exact=False)


def _plan_conv(op: Operation, rows: RowPadding, reaches: PaddingReaches) -> PaddedStep | None:
    """Plan a conv that does not mix the last axis: a kernel of one there, stride one, no padding."""
    pad = get_const_value(op.inputs.get("pad"), [0, 0])[-2:] if get_const_value(op.pad_type) == "custom" else [0, 0]
    if int(op.weight.shape[-1]) != 1 or get_const_value(op.strides, [1])[-1] != 1 or any(pad):
        return None
    return _plan_on_x(op, UNBOUNDED, exact=False)


_PLANNERS: dict[str, Callable[[Operation, RowPadding, PaddingReaches], PaddedStep | None]] = {
    **dict.fromkeys(_UNARY_OPS, _plan_unary),
    **dict.fromkeys(_BINARY_OPS, _plan_binary),
    **dict.fromkeys(_REDUCTION_OPS, _plan_reduce),
    **dict.fromkeys(("expand_dims", "squeeze"), _plan_axis_change),
    **dict.fromkeys(("concat", "stack"), _plan_join),
    "select": _plan_select,
    "transpose": _plan_transpose,
    "reshape": _plan_reshape,
    "split": _plan_split,
    "slice_by_index": _plan_slice,
    "softmax": _plan_softmax,
    "conv": _plan_conv,
}
