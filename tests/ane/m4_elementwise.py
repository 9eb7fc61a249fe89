"""The cases that work element by element: one input, two and three inputs, data types, ranks and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from .m4_build import fp16, table

__all__ = ["CASES"]

X = "1x64x32x32"
XX = f"{X} {X}"


def _one(op: str, **attributes: Any) -> Any:
    return X, lambda x: getattr(mb, op)(x=x, **attributes)


def _two(op: str, inputs: str = XX) -> Any:
    return inputs, lambda x, y: getattr(mb, op)(x=x, y=y)


def _compared(op: str) -> Any:
    return XX, lambda x, y: mb.cast(x=getattr(mb, op)(x=x, y=y), dtype="fp16")


def _positive(x: Any) -> Any:
    return mb.greater(x=x, y=fp16(0.0))


def _quantized(x: Any) -> Any:
    return mb.quantize(input=x, scale=fp16(0.1), output_dtype="int8")


_NAMES = """relu sigmoid tanh silu softplus softsign erf exp exp2 log sqrt rsqrt inverse abs sign
    sin cos tan asin acos atan sinh cosh atanh floor ceil round square relu6"""
_PAIRS = "add sub mul real_div maximum minimum pow floor_div mod"
_COMPARISONS = "equal not_equal less less_equal greater greater_equal"

_ONE = {op: _one(op) for op in _NAMES.split()} | {
    "gelu_exact": _one("gelu", mode="EXACT"),
    "gelu_tanh": _one("gelu", mode="TANH_APPROXIMATION"),
    "gelu_sigmoid": _one("gelu", mode="SIGMOID_APPROXIMATION"),
    "leaky_relu": _one("leaky_relu", alpha=0.1),
    "elu": _one("elu", alpha=1.0),
    "prelu": _one("prelu", alpha=np.full(64, 0.1, np.float16)),
    "clip": _one("clip", alpha=fp16(-1), beta=fp16(1)),
    "thresholded_relu": _one("thresholded_relu", alpha=0.5),
    "hard_sigmoid": _one("sigmoid_hard", alpha=0.2, beta=0.5),
    "scaled_tanh": _one("scaled_tanh", alpha=1.0, beta=1.0),
    "linear_act": _one("linear_activation", alpha=2.0, beta=1.0),
    "pow_const": _one("pow", y=fp16(3.0)),
    "pow_half": _one("pow", y=fp16(0.5)),
}

_SEVERAL = {op: _two(op) for op in _PAIRS.split()} | {
    "add_bc_ch": _two("add", f"{X} 1x64x1x1"),
    "add_bc_hw": _two("add", f"{X} 1x1x32x32"),
    "add_bc_w": _two("add", f"{X} 1x1x1x32"),
    "add_bc_both": _two("add", "1x64x1x32 1x1x32x1"),
    "add_bc_batch": _two("add", f"4x64x32x32 {X}"),
    **{op: _compared(op) for op in _COMPARISONS.split()},
    "select": (f"{XX} {X}", lambda m, x, y: mb.select(cond=_positive(m), a=x, b=y)),
    "logical_and": (XX, lambda x, y: mb.cast(x=mb.logical_and(x=_positive(x), y=_positive(y)), dtype="fp16")),
}

_TYPES = {
    "relu_f32": (f"{X}:fp32", lambda x: mb.relu(x=x)),
    "add_f32": _two("add", f"{X}:fp32 {X}:fp32"),
    "add_i32": _two("add", f"{X}:int32 {X}:int32"),
    "mul_i32": _two("mul", f"{X}:int32 {X}:int32"),
    "cast_f16_i32": _one("cast", dtype="int32"),
    "cast_i32_f16": (f"{X}:int32", lambda x: mb.cast(x=x, dtype="fp16")),
    "cast_f16_f32": _one("cast", dtype="fp32"),
    "cast_f16_i8": _one("cast", dtype="int8"),
    "quantize_i8": (X, _quantized),
    "q_dq_i8": (X, lambda x: mb.dequantize(input=_quantized(x), scale=fp16(0.1))),
}

_SIZES = {name: (shape, lambda x: mb.relu(x=x)) for name, shape in {
    "relu_r1": "65536", "relu_r2": "256x256", "relu_r3": "1x128x256", "relu_r5": "1x4x16x32x32",
    **{f"relu_w{size}": f"1x1x1x{size}" for size in (16384, 16385, 65536, 65537)},
    **{f"relu_c{size}": f"1x{size}x1x1" for size in (65536, 65537)},
    **{f"relu_h{size}": f"1x1x{size}x1" for size in (65536, 65537)},
    "relu_n64": "64x64x8x8", **{f"sw_relu_n{size}": f"{size}x64x32x32" for size in (2, 4, 8, 16)},
}.items()}

CASES = table(_ONE | _SEVERAL | _TYPES | _SIZES)
