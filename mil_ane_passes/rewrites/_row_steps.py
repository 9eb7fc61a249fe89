"""What one op does on rows that are padded at their end: element by element, or on other axes than the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ..core.query import is_const, is_opaque, value
from ._lift import same_op
from ._row_products import product_step, rows_taken
from ._rows import FAR, Rows, Step

__all__ = ["step_of"]

_SHRINK = ("abs", "atan", "cast", "gelu", "identity", "relu", "relu6", "silu", "sin", "softsign", "tanh",
           "thresholded_relu")
"|f(x)| <= |x|."
_UNIT = ("cos", "sigmoid", "sigmoid_hard", "sign")
"|f(x)| <= 1."
_FROM_ZERO = ("asin", "atanh", "ceil", "elu", "erf", "floor", "leaky_relu", "round", "sinh", "sqrt", "square", "tan")
"f(0) = 0; elsewhere a large or undefined value may come of a small one."
_NEAR_ZERO = ("acos", "cosh", "exp", "exp2", "softplus")
"|f(0)| < 2, and the same reserve."
_OTHER = ("batch_norm", "clamped_relu", "clip", "inverse", "linear_activation", "log", "prelu", "rsqrt", "scaled_tanh",
          "softplus_parametric", "threshold")
_UNARY = frozenset((*_SHRINK, *_UNIT, *_FROM_ZERO, *_NEAR_ZERO, *_OTHER))
_DIVIDES = ("real_div", "floor_div", "mod", "pow")
_BINARY = ("add", "sub", "mul", "maximum", "minimum", *_DIVIDES)
_REDUCES = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min")
_FINITE = 16384.0
"What a padding may reach at most to count as finite in fp16, sums included."

Reaches = Mapping[Var, float]
"""What the padding of each value that is made padded may reach."""


def step_of(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """How `op` is carried on padded rows; None where it cannot be carried."""
    if is_opaque(op) or op.blocks:
        return None
    if op.op_type in ("matmul", "linear"):
        return product_step(op, rows, reaches)
    known = _KINDS.get(op.op_type)
    if known is None or not all(rows.extent(var) for var in op.outputs):
        return rows_taken(op, rows, reaches) if op.op_type.startswith("reduce_") else None
    step = known(op, rows, reaches)
    if step is None or step.reach <= _FINITE:
        return step
    return Step(step.takes, step.gives, step.build, FAR, step.constants, step.exact)


def _on_x(op: Operation, reach: float, *, exact: bool = True, **changes: Any) -> Step:
    def build(mb: Any, wide: Callable[[Var], Var]) -> Any:
        return same_op(mb, op, x=wide(op.x), **changes)

    return Step((op.x,), tuple(op.outputs), build, reach, exact=exact)


def _unary(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    if rows.extent(op.x) is None or (op.op_type in ("batch_norm", "prelu", "softplus_parametric") and op.x.rank < 3):
        return None
    reach = reaches.get(op.x, 0.0)
    if op.op_type in _UNIT and reach < FAR:
        return _on_x(op, 1.0)
    if op.op_type in _SHRINK:
        return _on_x(op, reach)
    if reach == 0 and op.op_type in (*_FROM_ZERO, *_NEAR_ZERO):
        return _on_x(op, 0.0 if op.op_type in _FROM_ZERO else 2.0)
    return _on_x(op, FAR)


def _binary(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    x = _operand(op.x, op, rows, reaches)
    y = _operand(op.y, op, rows, reaches, fill=1.0 if op.op_type in _DIVIDES else 0.0)
    return _together(op, {"x": x, "y": y}, _joint(op, x, y), rows)


def _joint(op: Operation, x: _Operand | None, y: _Operand | None) -> float:
    one, other = (FAR if each is None else each.reach for each in (x, y))
    if FAR in (one, other):
        return FAR
    if op.op_type in ("add", "sub"):
        return one + other
    if op.op_type == "mul":
        return one * other
    if op.op_type in ("maximum", "minimum"):
        return max(one, other)
    padded_by_one = op.op_type == "real_div" and is_const(op.y) and op.y.rank and int(op.y.shape[-1]) > 1
    return one if padded_by_one else FAR


class _Operand:
    """One input of an op that works element by element: taken padded, padded as a const, or left as it is."""

    def __init__(self, var: Var, reach: float, wide: int | None = None, fill: float = 0.0) -> None:
        self.var, self.reach, self.wide, self.fill = var, reach, wide, fill

    @property
    def taken(self) -> bool:
        return self.wide is not None and not is_const(self.var)


def _operand(var: Var, op: Operation, rows: Rows, reaches: Reaches, fill: float = 0.0) -> _Operand | None:
    """None where the operand can be had neither padded nor as it is."""
    if not var.rank or int_or_none(var.shape[-1]) == 1:
        return _Operand(var, _largest(var))
    if int_or_none(var.shape[-1]) != int(op.outputs[0].shape[-1]):
        return None
    wide = rows.extent(op.outputs[0])
    if is_const(var):
        return _Operand(var, fill, wide, fill)
    return None if rows.extent(var) is None or _is_weight(var) else _Operand(var, reaches.get(var, 0.0), wide)


def int_or_none(extent: Any) -> int | None:
    """A fixed extent; None for a symbolic one."""
    return int(extent) if isinstance(extent, (int, np.integer)) else None


def _largest(var: Var) -> float:
    """The largest magnitude of a const; `FAR` for one that is not finite, and for what is known at run time only."""
    if not is_const(var):
        return FAR
    found = float(np.max(np.abs(np.asarray(var.val, np.float64)), initial=0.0))
    return found if np.isfinite(found) else FAR


def _is_weight(var: Var) -> bool:
    return var.op is not None and var.op.op_type.startswith("constexpr_")


def _together(op: Operation, given: dict[str, _Operand | None], reach: float, rows: Rows) -> Step | None:
    operands = {name: each for name, each in given.items() if each is not None}
    if len(operands) < len(given) or not any(each.wide for each in operands.values()):
        return None

    def build(mb: Any, wide: Callable[[Var], Var]) -> Any:
        changed = {}
        for name, each in operands.items():
            if each.taken:
                changed[name] = wide(op.inputs[name])
            elif each.wide is not None:
                changed[name] = rows.widened(mb, each.var, {-1: each.wide}, each.fill)
        return same_op(mb, op, **changed)

    constants = sum(rows.bytes_of(each.var, {-1: each.wide}) for each in operands.values() if each.wide)
    return Step(tuple(each.var for each in operands.values() if each.taken), tuple(op.outputs), build, reach, constants)


def _select(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    given = {name: _operand(op.inputs[name], op, rows, reaches) for name in ("cond", "a", "b")}
    values = [each.reach for name, each in given.items() if each is not None and name != "cond"]
    return _together(op, given, max(values, default=FAR), rows)


def _transpose(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    perm = value(op.perm)
    return None if perm is None or perm[-1] % op.x.rank != op.x.rank - 1 else _on_x(op, reaches.get(op.x, 0.0))


def _axes(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """expand_dims and squeeze that leave the last axis the last."""
    axes = value(op.axes)
    longer = op.x if op.op_type == "squeeze" else op.outputs[0]
    if axes is None or rows.extent(op.x) is None or any(axis % longer.rank == longer.rank - 1 for axis in axes):
        return None
    return _on_x(op, reaches.get(op.x, 0.0))


def _reshape(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """Rows stay rows where the last extent stays: the elements keep their order."""
    shape = value(op.shape)
    if shape is None or rows.extent(op.x) is None or int(op.x.shape[-1]) != int(op.outputs[0].shape[-1]):
        return None
    wide = rows.extent(op.outputs[0])
    return _on_x(op, reaches.get(op.x, 0.0), shape=np.array([*shape[:-1], wide], np.int32))


def _join(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """concat and stack on another axis than the last."""
    rank, wide = op.outputs[0].rank, rows.extent(op.outputs[0])
    if value(op.axis) is None or value(op.axis) % rank == rank - 1 or wide is None or any(map(_is_weight, op.values)):
        return None
    taken = tuple(dict.fromkeys(var for var in op.values if not is_const(var)))
    if any(rows.extent(var) is None for var in taken):
        return None

    def build(mb: Any, wider: Callable[[Var], Var]) -> Any:
        return same_op(mb, op, values=[
            rows.widened(mb, var, {-1: wide}) if is_const(var) else wider(var) for var in op.values])

    constants = sum(rows.bytes_of(var, {-1: wide}) for var in op.values)
    return Step(taken, tuple(op.outputs), build, max(reaches.get(var, 0.0) for var in op.values), constants)


def _split(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    axis = value(op.axis)
    if axis is None or axis % op.x.rank == op.x.rank - 1 or rows.extent(op.x) is None:
        return None
    return Step((op.x,), tuple(op.outputs), lambda mb, wide: mb.split(**{**op.inputs, "x": wide(op.x)}),
                reaches.get(op.x, 0.0))


def _slice(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """A slice of other axes that takes the last one whole."""
    names = ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")
    given = {name: value(op.inputs.get(name)) for name in names}
    if any(op.inputs.get(name) is not None and given[name] is None for name in names) or rows.extent(op.x) is None:
        return None
    width, last = int(op.x.shape[-1]), {name: each[-1] for name, each in given.items() if each is not None}
    from_front = last.get("begin_mask", False) or last["begin"] in (0, -width)
    to_end = last.get("end_mask", False) or last["end"] >= width
    if not from_front or not to_end or last.get("stride", 1) != 1 or last.get("squeeze_mask", False):
        return None
    masks: dict[str, Any] = {name: [*(given[name] or [False] * op.x.rank)[:-1], True]
                             for name in ("begin_mask", "end_mask")}
    return _on_x(op, reaches.get(op.x, 0.0), **masks)


def _softmax(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """A softmax of another axis: each lane is its own."""
    if value(op.axis) is None or value(op.axis) % op.x.rank == op.x.rank - 1:
        return None
    return _on_x(op, 1.0 if reaches.get(op.x, 0.0) < FAR else FAR, exact=False)


def _reduce(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """A reduction of other axes than the last."""
    axes = value(op.axes)
    if not axes or any(axis % op.x.rank == op.x.rank - 1 for axis in axes) or rows.extent(op.x) is None:
        return rows_taken(op, rows, reaches)
    reach = reaches.get(op.x, 0.0)
    return _on_x(op, FAR if op.op_type == "reduce_sum" and reach else reach, exact=False)


def _conv(op: Operation, rows: Rows, reaches: Reaches) -> Step | None:
    """A conv that does not mix the last axis: a kernel of one there, stride one, no padding."""
    pad = value(op.inputs.get("pad"), [0, 0])[-2:] if value(op.pad_type) == "custom" else [0, 0]
    if int(op.weight.shape[-1]) != 1 or value(op.strides, [1])[-1] != 1 or any(pad):
        return None
    return _on_x(op, FAR, exact=False)


_KINDS: dict[str, Callable[[Operation, Rows, Reaches], Step | None]] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_REDUCES, _reduce),
    **dict.fromkeys(("expand_dims", "squeeze"), _axes),
    **dict.fromkeys(("concat", "stack"), _join),
    "select": _select, "transpose": _transpose, "reshape": _reshape, "split": _split, "slice_by_index": _slice,
    "softmax": _softmax, "conv": _conv,
}
