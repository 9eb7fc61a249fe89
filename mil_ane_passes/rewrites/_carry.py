"""Ops that do the same on a value with a dummy axis: what they need changed, and why some cannot be carried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ..core.build import RewriteBuilder
from ..core.query import is_const, is_opaque, value
from ._lift import HEIGHT, WIDTH, cannot_lift, inserted, lifted_conv, same_op

__all__ = ["carried", "cannot_carry", "main_inputs"]

_UNARY = (
    "abs", "acos", "asin", "atan", "atanh", "ceil", "clip", "cos", "cosh", "erf", "exp", "exp2", "floor", "inverse",
    "log", "logical_not", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "threshold", "cast",
    "identity", "clamped_relu", "elu", "gelu", "leaky_relu", "linear_activation", "prelu", "relu", "relu6",
    "scaled_tanh", "sigmoid", "sigmoid_hard", "silu", "softplus", "softplus_parametric", "softsign",
    "thresholded_relu", "batch_norm",
)
"Element by element, or with parameters per channel (axis 1, which no dummy axis moves)."
_BINARY = ("add", "sub", "mul", "real_div", "floor_div", "maximum", "minimum", "mod", "pow")
_CONVS = ("conv", "conv_transpose")


def main_inputs(op: Operation) -> list[Var]:
    """The values that must have the dummy axis for `op` to be carried; consts are not among them."""
    if is_opaque(op):
        return []
    if op.op_type in _BINARY:
        return [var for var in (op.x, op.y) if not is_const(var) and var.rank]
    if op.op_type == "concat":
        return [var for var in op.values if not is_const(var)]
    return [op.x] if op.op_type in _KINDS else []


def cannot_carry(op: Operation, at: int) -> str | None:
    """Why `op` cannot be carried with the dummy axis at position `at` (2 or 3), or None when it can."""
    if op.op_type not in _KINDS or is_opaque(op):
        return f"{op.op_type} is not known to be the same with a dummy axis"
    if any(var.rank != 3 for var in [*main_inputs(op), *op.outputs]) or not main_inputs(op):
        return "not every value has rank 3"
    return _KINDS[op.op_type][0](op, at)


def carried(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> list[Var]:
    """The outputs of `op` with the dummy axis at position `at`; `wide` gives the rank-4 form of its `main_inputs`."""
    made = _KINDS[op.op_type][1](mb, op, wide, at)
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _always(op: Operation, at: int) -> str | None:
    return None


def _on_x(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    return same_op(mb, op, x=wide(op.x))


def _binary(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    """A const operand gets the dummy axis too, counted from the end, which keeps how it broadcasts."""

    def operand(var: Var) -> Var:
        if var.rank == 0:
            return var
        if not is_const(var):
            return wide(var)
        shape = tuple(var.shape)
        cut = len(shape) if at == 3 else len(shape) - 1
        return mb.reshaped(var, (*shape[:cut], 1, *shape[cut:]))

    return same_op(mb, op, x=operand(op.x), y=operand(op.y))


def _conv_reason(op: Operation, at: int) -> str | None:
    return cannot_lift(op, _option(at))


def _conv(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    return lifted_conv(mb, op, wide(op.x), _option(at))


def _pad_reason(op: Operation, at: int) -> str | None:
    if value(op.pad) is None:
        return "pad is not constant"
    full = _full_pad(op)
    if value(op.mode) != "constant" and any(full[:4]):
        return f"pad of mode {value(op.mode)} reaches beyond the last axis"
    return None


def _pad(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    pad = inserted(_full_pad(op), 2 * at, [0, 0])
    while len(pad) > 2 and not any(pad[:2]):  # reflect and replicate take the last two axes only
        pad = pad[2:]
    return same_op(mb, op, x=wide(op.x), pad=pad)


def _full_pad(op: Operation) -> list[int]:
    given: list[int] = value(op.pad)
    return [0] * (6 - len(given)) + given


def _slice_reason(op: Operation, at: int) -> str | None:
    names = ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask", "size")
    for name in names:
        var = op.inputs.get(name)
        if var is not None and value(var) is None:
            return f"{name} is not constant"
    if any(value(op.inputs.get("squeeze_mask"), [])):
        return "the slice drops an axis"
    return None


def _slice(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    neutral = {"begin": 0, "end": 1, "stride": 1, "begin_mask": True, "end_mask": True, "squeeze_mask": False,
               "size": 1}
    changed: dict[str, Any] = {}
    for name, var in op.inputs.items():
        if name in neutral:
            changed[name] = np.insert(np.asarray(var.val), at, neutral[name])
    return same_op(mb, op, x=wide(op.x), **changed)


def _concat_reason(op: Operation, at: int) -> str | None:
    return "one of the values is constant" if any(is_const(var) for var in op.values) else None


def _concat(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Var:
    axis = int(value(op.axis)) % 3
    return same_op(mb, op, values=[wide(var) for var in op.values], axis=axis + (axis >= at))


def _split_reason(op: Operation, at: int) -> str | None:
    return "axis is not constant" if value(op.axis) is None else None


def _split(mb: RewriteBuilder, op: Operation, wide: Callable[[Var], Var], at: int) -> Any:
    axis = int(value(op.axis)) % 3
    return mb.split(**{**op.inputs, "x": wide(op.x), "axis": axis + (axis >= at)})


def _option(at: int) -> int:
    return HEIGHT if at == 3 else WIDTH


_Reason = Callable[[Operation, int], "str | None"]
_Build = Callable[[RewriteBuilder, Operation, Callable[[Var], Var], int], Any]
_KINDS: dict[str, tuple[_Reason, _Build]] = {
    **dict.fromkeys(_UNARY, (_always, _on_x)),
    **dict.fromkeys(_BINARY, (_always, _binary)),
    **dict.fromkeys(_CONVS, (_conv_reason, _conv)),
    "pad": (_pad_reason, _pad),
    "slice_by_index": (_slice_reason, _slice),
    "slice_by_size": (_slice_reason, _slice),
    "concat": (_concat_reason, _concat),
    "split": (_split_reason, _split),
}
