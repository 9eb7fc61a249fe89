"""Products and sums that read padded rows, or make them by columns of zeros in a constant factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coremltools.converters.mil.mil import Operation, Var

from ..core.query import is_const, value
from ._lift import same_op
from ._rows import FAR, Rows, Step

__all__ = ["product_step", "rows_taken"]

_SUMS = ("reduce_sum", "reduce_l1_norm", "reduce_l2_norm", "reduce_sum_square")


def rows_taken(op: Operation, rows: Rows, reaches: Mapping[Var, float]) -> Step | None:
    """A sum over the last axis, of rows that are made with zeros behind them."""
    axes = value(op.axes) if op.op_type in _SUMS and op.inputs.get("axes") is not None else [-1]
    if op.op_type not in _SUMS or reaches.get(op.x) != 0 or not any(axis % op.x.rank == op.x.rank - 1 for axis in axes):
        return None
    return Step((op.x,), (), lambda mb, wide: same_op(mb, op, x=wide(op.x)), 0.0, exact=False)


def product_step(op: Operation, rows: Rows, reaches: Mapping[Var, float]) -> Step | None:
    """matmul and linear: what is summed over may be padded on both sides, and so may the columns of the result.

    A padding that is summed over has to be exactly zero on one side and known to be finite on the other.
    """
    sides = _sides(op)
    if sides is None:
        return None
    x, y, inner_last, columns_at = sides
    inner = rows.extent(x) if inner_last and _can_sum(x, y, columns_at, rows, reaches) else None
    columns = rows.extent(op.outputs[0])
    if columns is not None and not is_const(y) and (columns_at != -1 or rows.extent(y) is None or _packed(y)):
        columns = None
    if inner is None and columns is None:
        return None
    runtime = not is_const(y) and (columns is not None or inner is not None)
    takes = tuple(dict.fromkeys([*((x,) if inner is not None else ()), *((y,) if runtime else ())]))

    axes = {axis: wide for axis, wide in ((-3 - columns_at, inner), (columns_at, columns)) if wide is not None}

    def build(mb: Any, wide: Callable[[Var], Var]) -> Any:
        changed: dict[str, Any] = {"x": wide(op.x)} if inner is not None else {}
        name = "weight" if op.op_type == "linear" else "y"
        if is_const(y):
            changed[name] = rows.widened(mb, y, axes)
        elif runtime:
            changed[name] = wide(op.inputs[name])
        bias = op.inputs.get("bias")
        if bias is not None and columns is not None:
            changed["bias"] = rows.widened(mb, bias, {-1: columns})
        return same_op(mb, op, **changed)

    constants = rows.bytes_of(y, axes)
    gives = tuple(op.outputs) if columns is not None else ()
    return Step(takes, gives, build, FAR, constants, exact=False, keeps=(x,) if inner is None else ())


def _sides(op: Operation) -> tuple[Var, Var, bool, int] | None:
    """Both factors, whether the last axis of the first is summed over, and where the second has its columns."""
    if op.op_type == "linear":
        bias = op.inputs.get("bias")
        return (op.x, op.weight, True, -2) if is_const(op.weight) and (bias is None or is_const(bias)) else None
    if op.x.rank < 2 or op.y.rank < 2 or is_const(op.x) or _packed(op.x) or _packed(op.y):
        return None
    return op.x, op.y, not value(op.transpose_x, False), -2 if value(op.transpose_y, False) else -1


def _can_sum(x: Var, y: Var, columns_at: int, rows: Rows, reaches: Mapping[Var, float]) -> bool:
    if x not in reaches or rows.extent(x) is None:
        return False
    if is_const(y):
        return reaches[x] < FAR
    if columns_at == -1 or y not in reaches:
        return False
    return max(reaches[x], reaches[y]) < FAR and 0 in (reaches[x], reaches[y])


def _packed(var: Var) -> bool:
    return var.op is not None and var.op.op_type.startswith("constexpr_")
