"""Matrix products. Operands are brought to one memory layout first: it decides how a library orders its sums."""

from __future__ import annotations

from typing import Any

import torch

from ..numeric import tidy
from ..registry import kernel
from .elementwise_binary import same_kind


@kernel("linear")
def linear(op: Any, ins: Any) -> torch.Tensor:
    x, weight = same_kind(ins["x"], ins["weight"])
    bias = ins.get("bias")
    # Leading axes only group rows: one matrix product, whatever the rank.
    y = torch.matmul(tidy(x.reshape(-1, x.shape[-1])), weight.t())
    y.add_(0 if bias is None else bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


@kernel("matmul")
def matmul(op: Any, ins: Any) -> torch.Tensor:
    x, y = same_kind(ins["x"], ins["y"])
    if ins.value("transpose_x") and x.dim() > 1:
        x = x.mT
    if ins.value("transpose_y") and y.dim() > 1:
        y = y.mT
    return torch.matmul(tidy(x), tidy(y))


@kernel("einsum")
def einsum(op: Any, ins: Any) -> torch.Tensor:
    return torch.einsum(ins.value("equation"), *[tidy(value) for value in ins["values"]])
