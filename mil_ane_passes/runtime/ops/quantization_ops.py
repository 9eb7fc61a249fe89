"""Activation quantization."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import register_kernel


@register_kernel("quantize")
def quantize(op: Any, ins: Any) -> torch.Tensor:
    x, zero_point = ins["input"], ins.get("zero_point")
    low, high = (0, 255) if ins.value("output_dtype") == "uint8" else (-128, 127)
    y = torch.round(x / _reshape_along_axis(ins, ins["scale"]))
    if zero_point is not None:
        y = y + _reshape_along_axis(ins, zero_point).to(y.dtype)
    return torch.clamp(y, low, high)


@register_kernel("dequantize")
def dequantize(op: Any, ins: Any) -> torch.Tensor:
    y, zero_point = ins["input"].to(ins.compute), ins.get("zero_point")
    if zero_point is not None:
        y = y - _reshape_along_axis(ins, zero_point).to(y.dtype)
    return y * _reshape_along_axis(ins, ins["scale"])


def _reshape_along_axis(ins: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Reshape a vector parameter to broadcast along `axis`; return a scalar unchanged."""
    if parameter.dim() == 0:
        return parameter
    shape = [1] * ins["input"].dim()
    shape[ins.value("axis")] = -1
    return parameter.reshape(shape)
