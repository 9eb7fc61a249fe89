"""Elementwise ops of two operands, with numpy broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..registry import register_kernel

__all__ = ["promote_operands"]


def _choose_zero(z: torch.Tensor, x: torch.Tensor, y: torch.Tensor, are_negative: Callable[..., Any]) -> torch.Tensor:
    """Return `z` with the sign of its zeros where both operands are zero: the larger is +0, the smaller is -0.

    In torch the sign of the extreme of +0 and -0 depends on how the operands are broadcast.
    """
    zeros = z == 0
    if not z.is_floating_point() or not bool(zeros.any()):
        return z
    signed = torch.where(are_negative(x.signbit(), y.signbit()), -0.0, 0.0).to(z.dtype)
    return torch.where(zeros & (x == 0) & (y == 0), signed, z)


_TORCH_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "maximum": lambda x, y: _choose_zero(torch.maximum(x, y), x, y, torch.logical_and),
    "minimum": lambda x, y: _choose_zero(torch.minimum(x, y), x, y, torch.logical_or),
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "pow": torch.pow,
}


@register_kernel(*_TORCH_FUNCTIONS)
def evaluate_binary(op: Any, ins: Any) -> torch.Tensor:
    """Evaluate an op with torch's function of the same meaning; int32 wraps."""
    return _TORCH_FUNCTIONS[op.op_type](*promote_operands(ins["x"], ins["y"]))


@register_kernel("real_div")
def real_div(op: Any, ins: Any) -> torch.Tensor:
    """Divide `x` by `y`.

    Integers give the exact quotient (0 for a division by zero), truncated when it is stored as an integer.
    """
    x, y = ins["x"], ins["y"]
    if x.is_floating_point() or y.is_floating_point():
        return x / y
    return torch.where(y == 0, 0.0, x.double() / y.double())


@register_kernel("floor_div")
def floor_div(op: Any, ins: Any) -> torch.Tensor:
    x, y = promote_operands(ins["x"], ins["y"])
    if x.is_floating_point():
        return torch.div(x, y, rounding_mode="floor")
    # int64 holds the only quotient that int32 cannot (-2**31 // -1). Division by zero gives 0, as in numpy.
    wide = torch.div(x.long(), torch.where(y == 0, 1, y).long(), rounding_mode="floor")
    return torch.where(y == 0, 0, wide)


@register_kernel("mod")
def mod(op: Any, ins: Any) -> torch.Tensor:
    """Compute the remainder with the sign of the divisor.

    A remainder of zero has this sign too, as in numpy and unlike in torch.
    """
    x, y = promote_operands(ins["x"], ins["y"])
    if x.is_floating_point():
        rest = torch.remainder(x, y)
        return torch.where(rest == 0, torch.copysign(torch.zeros_like(rest), y), rest)
    wide = torch.remainder(x.long(), torch.where(y == 0, 1, y).long())
    return torch.where(y == 0, 0, wide)


def promote_operands(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert both operands to their common dtype.

    torch ignores the dtype of a 0-d operand in the result's dtype, and `maximum` requires equal dtypes.
    """
    if x.dtype is y.dtype:
        return x, y
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)
