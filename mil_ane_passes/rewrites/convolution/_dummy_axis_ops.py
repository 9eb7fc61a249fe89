"""Ops that can be carried with a dummy axis: the parameters that change, and the obstacles of other ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_opaque
from ._conv_1d_lifting import HEIGHT, WIDTH, build_lifted_conv, find_lift_obstacle, insert_numbers, rebuild_op

__all__ = ["build_carried_op", "collect_main_inputs", "find_carry_obstacle"]

_UNARY_OPS = (
    "abs", "acos", "asin", "atan", "atanh", "ceil", "clip", "cos", "cosh", "erf", "exp", "exp2", "floor", "inverse",
    "log", "logical_not", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "threshold", "cast",
    "identity", "clamped_relu", "elu", "gelu", "leaky_relu", "linear_activation", "prelu", "relu", "relu6",
    "scaled_tanh", "sigmoid", "sigmoid_hard", "silu", "softplus", "softplus_parametric", "softsign",
    "thresholded_relu", "batch_norm",
)
"Ops that work element by element, or with parameters per channel (axis 1, which no dummy axis moves)."
_BINARY_OPS = ("add", "sub", "mul", "real_div", "floor_div", "maximum", "minimum", "mod", "pow")
_CONV_OPS = ("conv", "conv_transpose")


def collect_main_inputs(op: Operation) -> list[Var]:
    """Return the values that need the dummy axis for `op` to be carried; consts are not among them."""
    if is_opaque(op):
        return []
    if op.op_type in _BINARY_OPS:
        return [var for var in (op.x, op.y) if not is_const(var) and var.rank]
    if op.op_type == "concat":
        return [var for var in op.values if not is_const(var)]
    return [op.x] if op.op_type in _CARRIED_OPS else []


def find_carry_obstacle(op: Operation, at: int) -> str | None:
    """Return why `op` cannot be carried with the dummy axis at position `at` (2 or 3), or None when it can."""
    if op.op_type not in _CARRIED_OPS or is_opaque(op):
        return f"{op.op_type} is not known to be the same with a dummy axis"
    if any(var.rank != 3 for var in [*collect_main_inputs(op), *op.outputs]) or not collect_main_inputs(op):
        return "not every value has rank 3"
    return _CARRIED_OPS[op.op_type][0](op, at)


def build_carried_op(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> list[Var]:
    """Build the outputs of `op` with the dummy axis at position `at`.

    `wide` returns the rank-4 form of each of its `collect_main_inputs`.
    """
    made = _CARRIED_OPS[op.op_type][1](mb, op, wide, at)
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _accept_always(op: Operation, at: int) -> str | None:
    return None


def _carry_unary(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    return rebuild_op(mb, op, x=wide(op.x))


def _carry_binary(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    """Carry an op of two operands.

    A const operand gets the dummy axis, too, counted from the end to keep its broadcast.
    """

    def operand(var: Var) -> Var:
        if var.rank == 0:
            return var
        if not is_const(var):
            return wide(var)
        shape = tuple(var.shape)
        cut = len(shape) if at == 3 else len(shape) - 1
        return mb.reshaped(var, (*shape[:cut], 1, *shape[cut:]))

    return rebuild_op(mb, op, x=operand(op.x), y=operand(op.y))


def _find_conv_obstacle(op: Operation, at: int) -> str | None:
    return find_lift_obstacle(op, _lift_axis_from_position(at))


def _carry_conv(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    return build_lifted_conv(mb, op, wide(op.x), _lift_axis_from_position(at))


def _find_pad_obstacle(op: Operation, at: int) -> str | None:
    if get_const_value(op.pad) is None:
        return "pad is not constant"
    full = _expand_pad_to_rank_3(op)
    if get_const_value(op.mode) != "constant" and any(full[:4]):
        return f"pad of mode {get_const_value(op.mode)} reaches beyond the last axis"
    return None


def _carry_pad(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    pad = insert_numbers(_expand_pad_to_rank_3(op), 2 * at, [0, 0])
    while len(pad) > 2 and not any(pad[:2]):  # reflect and replicate support the last two axes only
        pad = pad[2:]
    return rebuild_op(mb, op, x=wide(op.x), pad=pad)


def _expand_pad_to_rank_3(op: Operation) -> list[int]:
    given: list[int] = get_const_value(op.pad)
    return [0] * (6 - len(given)) + given


def _find_slice_obstacle(op: Operation, at: int) -> str | None:
    names = ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask", "size")
    for name in names:
        var = op.inputs.get(name)
        if var is not None and get_const_value(var) is None:
            return f"{name} is not constant"
    if any(get_const_value(op.inputs.get("squeeze_mask"), [])):
        return "the slice drops an axis"
    return None


def _carry_slice(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    neutral = {"begin": 0, "end": 1, "stride": 1, "begin_mask": True, "end_mask": True, "squeeze_mask": False,
               "size": 1}
    changed: dict[str, Any] = {}
    for name, var in op.inputs.items():
        if name in neutral:
            changed[name] = np.insert(np.asarray(var.val), at, neutral[name])
    return rebuild_op(mb, op, x=wide(op.x), **changed)


def _find_concat_obstacle(op: Operation, at: int) -> str | None:
    return "one of the values is constant" if any(is_const(var) for var in op.values) else None


def _carry_concat(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    axis = int(get_const_value(op.axis)) % 3
    return rebuild_op(mb, op, values=[wide(var) for var in op.values], axis=axis + (axis >= at))


def _find_split_obstacle(op: Operation, at: int) -> str | None:
    return "axis is not constant" if get_const_value(op.axis) is None else None


def _carry_split(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Any:
    axis = int(get_const_value(op.axis)) % 3
    return mb.split(**{**op.inputs, "x": wide(op.x), "axis": axis + (axis >= at)})


def _lift_axis_from_position(at: int) -> int:
    return HEIGHT if at == 3 else WIDTH


_ObstacleFinder = Callable[[Operation, int], "str | None"]
_CarriedBuilder = Callable[[RewriteBuilder, Operation, Callable[[Var], Var], int], Any]
_CARRIED_OPS: dict[str, tuple[_ObstacleFinder, _CarriedBuilder]] = {
    **dict.fromkeys(_UNARY_OPS, (_accept_always, _carry_unary)),
    **dict.fromkeys(_BINARY_OPS, (_accept_always, _carry_binary)),
    **dict.fromkeys(_CONV_OPS, (_find_conv_obstacle, _carry_conv)),
    "pad": (_find_pad_obstacle, _carry_pad),
    "slice_by_index": (_find_slice_obstacle, _carry_slice),
    "slice_by_size": (_find_slice_obstacle, _carry_slice),
    "concat": (_find_concat_obstacle, _carry_concat),
    "split": (_find_split_obstacle, _carry_split),
}
