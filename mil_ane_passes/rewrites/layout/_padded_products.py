"""Products and sums that read padded rows, or produce them by columns of zeros in a constant factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coremltools.converters.mil.mil import Operation, Var

from ...ir.query import get_const_value, is_const
from ..convolution._conv_1d_lifting import rebuild_op
from ._row_padding import UNBOUNDED, PaddedStep, RowPadding

__all__ = ["plan_product", "plan_row_sum"]

_SUM_OPS = ("reduce_sum", "reduce_l1_norm", "reduce_l2_norm", "reduce_sum_square")


def plan_row_sum(op: Operation, rows: RowPadding, reaches: Mapping[Var, float]) -> PaddedStep | None:
    """Plan a sum over the last axis of rows that are padded with zeros."""
    axes = get_const_value(op.axes) if op.op_type in _SUM_OPS and op.inputs.get("axes") is not None else [-1]
    if (
        op.op_type not in _SUM_OPS
        or reaches.get(op.x) != 0
        or not any(axis % op.x.rank == op.x.rank - 1 for axis in axes)
    ):
        return None
    return PaddedStep((op.x,), (), lambda mb, wide: rebuild_op(mb, op, x=wide(op.x)), 0.0, exact=False)


def plan_product(op: Operation, rows: RowPadding, reaches: Mapping[Var, float]) -> PaddedStep | None:
    """Plan a matmul or linear: the summed axis may be padded on both sides, and so may the columns of the result.

    A padding that is summed over has to be exactly zero on one side and known to be finite on the other.
    """
    sides = _read_factors(op)
    if sides is None:
        return None
    x, y, inner_last, columns_at = sides
    inner = rows.extent(x) if inner_last and _can_sum_padding(x, y, columns_at, rows, reaches) else None
    columns = rows.extent(op.outputs[0])
    if (
        columns is not None
        and not is_const(y)
        and (columns_at != -1 or rows.extent(y) is None or _is_compressed_weight(y))
    ):
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
            changed[name] = rows.pad_const(mb, y, axes)
        elif runtime:
            changed[name] = wide(op.inputs[name])
        bias = op.inputs.get("bias")
        if bias is not None and columns is not None:
            changed["bias"] = rows.pad_const(mb, bias, {-1: columns})
        return rebuild_op(mb, op, **changed)

    constants = rows.count_padded_bytes(y, axes)
    gives = tuple(op.outputs) if columns is not None else ()
    return PaddedStep(
        takes, gives, build, UNBOUNDED, constants, exact=False, unpadded_inputs=(x,) if inner is None else ()
    )


def _read_factors(op: Operation) -> tuple[Var, Var, bool, int] | None:
    """Return both factors, whether the last axis of the first is summed over, and the axis of the second's columns."""
    if op.op_type == "linear":
        bias = op.inputs.get("bias")
        return (op.x, op.weight, True, -2) if is_const(op.weight) and (bias is None or is_const(bias)) else None
    if op.x.rank < 2 or op.y.rank < 2 or is_const(op.x) or _is_compressed_weight(op.x) or _is_compressed_weight(op.y):
        return None
    return op.x, op.y, not get_const_value(op.transpose_x, False), -2 if get_const_value(op.transpose_y, False) else -1


def _can_sum_padding(x: Var, y: Var, columns_at: int, rows: RowPadding, reaches: Mapping[Var, float]) -> bool:
    if x not in reaches or rows.extent(x) is None:
        return False
    if is_const(y):
        return reaches[x] < UNBOUNDED
    if columns_at == -1 or y not in reaches:
        return False
    return max(reaches[x], reaches[y]) < UNBOUNDED and 0 in (reaches[x], reaches[y])


def _is_compressed_weight(var: Var) -> bool:
    return var.op is not None and var.op.op_type.startswith("constexpr_")
