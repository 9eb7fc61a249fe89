"""Sums over axes as matrix products with a column of one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.block_editor import get_first_op
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic

__all__ = ["restore_reduced_shape", "sum_by_matmul"]


def sum_by_matmul(mb: RewriteBuilder, x: Var, axes: list[int], factor: float) -> Var:
    """Build `factor` times the sums of fp16 `x` over `axes` (sorted): the other axes, then one of extent 1."""
    kept = [axis for axis in range(x.rank) if axis not in axes]
    order = [*kept, *axes]
    rows = x if order == sorted(order) else mb.transpose(x=x, perm=order)
    count = math.prod(int(x.shape[axis]) for axis in axes)
    if len(axes) > 1 or not kept:
        outer = [-1 if is_symbolic(x.shape[axis]) else int(x.shape[axis]) for axis in kept]
        rows = mb.reshape(x=rows, shape=[*(outer or [1]), count])
    total: Var = mb.matmul(x=rows, y=_build_column(mb, count, factor))
    return total


def restore_reduced_shape(mb: RewriteBuilder, total: Var, op: Operation, axes: list[int]) -> Var:
    """Reshape the result of `sum_by_matmul` to the shape of reduction `op`'s output."""
    keeps = bool(get_const_value(op.keep_dims, False))
    if keeps and axes == [op.x.rank - 1] and op.x.rank > 1:
        return total
    if len(axes) == op.x.rank:
        whole: Var = mb.reshape(x=total, shape=[1] * op.x.rank) if keeps else mb.squeeze(x=total, axes=[0, 1])
        return whole
    narrow: Var = mb.squeeze(x=total, axes=[-1])
    return mb.expand_dims(x=narrow, axes=axes) if keeps else narrow


def _build_column(mb: RewriteBuilder, count: int, factor: float) -> Var:
    """Return a constant column, shared by all sums of this length in the block."""

    def make() -> Any:
        with mb.at(get_first_op(mb.block), f"ones_{count}"):
            return mb.const(val=np.full((count, 1), factor, np.float16))

    column: Var = mb.once(("column", count, factor), make)
    return column
