"""Matrix products. Operands are first copied to one memory layout, because a library orders its sums by the layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..numeric import canonicalize_layout
from ..registry import register_kernel
from .elementwise_binary import promote_operands


@register_kernel("linear")
def linear(op: Any, ins: Any) -> torch.Tensor:
    blocks = ins.iterate_blocks("weight")
    if blocks is not None and ins["x"].dtype == ins.compute:
        x, bias = ins["x"], ins.get("bias")
        y = _multiply_blocks(canonicalize_layout(x.reshape(-1, x.shape[-1])), blocks, int(ins.var("weight").shape[0]))
        y.add_(0 if bias is None else bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    x, weight = promote_operands(ins["x"], ins["weight"])
    bias = ins.get("bias")
    # Leading axes only group rows: one matrix product at any rank.
    y = torch.matmul(canonicalize_layout(x.reshape(-1, x.shape[-1])), weight.t())
    y.add_(0 if bias is None else bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _multiply_blocks(x: torch.Tensor, blocks: Iterator[tuple[int, torch.Tensor]], count: int) -> torch.Tensor:
    """Multiply x (rows, inner) with a matrix (`count`, inner) that `blocks` yields in blocks of rows."""
    y = torch.empty((x.shape[0], count), dtype=x.dtype)
    for start, rows in blocks:
        torch.matmul(x, rows.t(), out=y[:, start : start + len(rows)])
    return y


@register_kernel("matmul")
def matmul(op: Any, ins: Any) -> torch.Tensor:
    blocks = ins.iterate_blocks("y") if ins.value("transpose_y") and not ins.value("transpose_x") else None
    if blocks is not None and ins["x"].dtype == ins.compute and ins["x"].dim() > 1:
        x = ins["x"]
        y = _multiply_blocks(canonicalize_layout(x.reshape(-1, x.shape[-1])), blocks, int(ins.var("y").shape[0]))
        return y.reshape(*x.shape[:-1], y.shape[-1])
    x, y = promote_operands(ins["x"], ins["y"])
    if ins.value("transpose_x") and x.dim() > 1:
        x = x.mT
    if ins.value("transpose_y") and y.dim() > 1:
        y = y.mT
    return torch.matmul(canonicalize_layout(x), canonicalize_layout(y))


@register_kernel("einsum")
def einsum(op: Any, ins: Any) -> torch.Tensor:
    return torch.einsum(ins.value("equation"), *[canonicalize_layout(value) for value in ins["values"]])
