"""Elementwise ops of one operand."""

from __future__ import annotations

from typing import Any

import torch
from coremltools.converters.mil.mil import types

from ..registry import register_kernel

_TORCH_FUNCTIONS = {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,  # not rounded first: mod and floor_div are defined by it
    "logical_not": torch.logical_not,
    "round": torch.round,  # half to even, as in numpy
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
}


@register_kernel(*_TORCH_FUNCTIONS)
def evaluate_unary(op: Any, ins: Any) -> torch.Tensor:
    """Evaluate an op with torch's function of the same meaning."""
    return _TORCH_FUNCTIONS[op.op_type](ins["x"])


@register_kernel("cast")
def cast(op: Any, ins: Any) -> torch.Tensor:
    """Return `x`: storing it in the declared dtype converts it.

    Storing truncates floats toward zero and saturates them at the ends of an integer type (which MIL leaves open), and
    keeps the low bits of integers. At float64, floats near an integer are rounded to it before they are truncated.
    """
    x: torch.Tensor = ins["x"]
    return round_to_near_integers(x) if x.dtype is torch.float64 and types.is_int(op.outputs[0].dtype) else x


@register_kernel("ceil")
def ceil(op: Any, ins: Any) -> torch.Tensor:
    return torch.ceil(round_to_near_integers(ins["x"]))


def round_to_near_integers(x: torch.Tensor) -> torch.Tensor:
    """Round float64 values to an integer where float32 cannot distinguish the two (below 2**24); keep all others.

    No value of a program has more digits than float32. `log(2) / log(16) * 8` of float32 constants is 2 at float32 and
    2 - 4e-8 at float64, which would be truncated to 1.
    """
    if x.dtype is not torch.float64:
        return x
    narrow = x.float().double()
    return torch.where((narrow == narrow.round()) & (narrow.abs() < 2**24), narrow, x)


@register_kernel("clip")
def clip(op: Any, ins: Any) -> torch.Tensor:
    y = torch.maximum(ins["x"], ins["alpha"])
    return torch.minimum(y, ins["beta"], out=y)


@register_kernel("exp2")
def exp2(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    return torch.exp2(x if x.is_floating_point() else x.double())


@register_kernel("inverse")
def inverse(op: Any, ins: Any) -> torch.Tensor:
    return (ins["x"] + ins["epsilon"]).reciprocal_()


@register_kernel("log")
def log(op: Any, ins: Any) -> torch.Tensor:
    return (ins["x"] + ins["epsilon"]).log_()


@register_kernel("rsqrt")
def rsqrt(op: Any, ins: Any) -> torch.Tensor:
    return (ins["x"] + ins["epsilon"]).sqrt_().reciprocal_()


@register_kernel("sign")
def sign(op: Any, ins: Any) -> torch.Tensor:
    x = ins["x"]
    # torch returns 0 for sign(NaN); numpy and IEEE return NaN.
    y = torch.sign(x)
    return torch.where(torch.isnan(x), x, y, out=y) if x.is_floating_point() else y


@register_kernel("threshold")
def threshold(op: Any, ins: Any) -> torch.Tensor:
    return torch.maximum(ins["x"], ins["alpha"].to(ins["x"].dtype))
