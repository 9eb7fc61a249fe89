"""Activation quantisation."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import kernel


@kernel("quantize")
def quantize(op: Any, ins: Any) -> torch.Tensor:
    x, zero_point = ins["input"], ins.get("zero_point")
    low, high = (0, 255) if ins.value("output_dtype") == "uint8" else (-128, 127)
    y = torch.round(x / _along_axis(ins, ins["scale"]))
    if zero_point is not None:
        y = y + _along_axis(ins, zero_point).to(y.dtype)
    return torch.clamp(y, low, high)


@kernel("dequantize")
def dequantize(op: Any, ins: Any) -> torch.Tensor:
    y, zero_point = ins["input"].to(ins.compute), ins.get("zero_point")
    if zero_point is not None:
        y = y - _along_axis(ins, zero_point).to(y.dtype)
    return y * _along_axis(ins, ins["scale"])


def _along_axis(ins: Any, parameter: torch.Tensor) -> torch.Tensor:
    """A vector parameter broadcast along `axis`; a scalar as it is."""
    if parameter.dim() == 0:
        return parameter
    shape = [1] * ins["input"].dim()
    shape[ins.value("axis")] = -1
    return parameter.reshape(shape)
