"""The cases of layers: convolution, matrices, attention, recurrence, pools, norms, reductions, and their sweeps."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from .m4_build import W, table

__all__ = ["CASES"]

X = "1x64x32x32"
ROWS = "1x128x256"
HEADS = "1x8x128x64"


def _conv(kernel: tuple[int, ...], inputs: str = X, channels: tuple[int, int] = (64, 64), **attributes: Any) -> Any:
    return inputs, lambda x: mb.conv(x=x, weight=W(*channels, *kernel), **attributes)


def _same(kernel: tuple[int, ...], **attributes: Any) -> Any:
    return _conv(kernel, pad_type="same", **attributes)


def _transposed(kernel: tuple[int, ...], inputs: str = X, channels: int = 64, **attributes: Any) -> Any:
    return inputs, lambda x: mb.conv_transpose(x=x, weight=W(channels, channels, *kernel),
                                               strides=[2] * len(kernel), **attributes)


def _product(inputs: str, **attributes: Any) -> Any:
    return inputs, lambda x, y: mb.matmul(x=x, y=y, **attributes)


def _pool(kind: str, kernel: tuple[int, ...], pad: str = "same", stride: int = 1, inputs: str = X) -> Any:
    return inputs, lambda x: getattr(mb, kind)(x=x, kernel_sizes=kernel, strides=[stride] * len(kernel), pad_type=pad)


def _norm(op: str, inputs: str = X, **attributes: Any) -> Any:
    return inputs, lambda x: getattr(mb, op)(x=x, **attributes)


def _reduce(kind: str, *axes: int) -> Any:
    return X, lambda x: getattr(mb, f"reduce_{kind}")(x=x, axes=list(axes), keep_dims=True)


def _argmax(axis: int) -> Any:
    return X, lambda x: mb.cast(x=mb.reduce_argmax(x=x, axis=axis, keep_dims=True), dtype="fp16")


def _zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float16)


def _recurrent(kind: str, gates: int) -> Any:
    def body(x: Any) -> Any:
        states = {"initial_h": _zeros(1, 64), **({"initial_c": _zeros(1, 64)} if kind == "lstm" else {})}
        return getattr(mb, kind)(x=x, weight_ih=W(gates * 64, 64), weight_hh=W(gates * 64, 64), output_sequence=True,
                                 **states)[0]
    return "16x1x64", body


_MATRICES = {
    "conv1x1": _conv((1, 1)), "conv3x3": _same((3, 3)),
    "conv3x3_dw": _same((3, 3), channels=(64, 1), groups=64),
    "conv7x7_s2": _same((7, 7), strides=[2, 2]), "conv3x3_d2": _same((3, 3), dilations=[2, 2]),
    "conv_k17": _same((17, 17)), "conv_k1x31": _same((1, 31)), "conv_s5": _conv((5, 5), strides=[5, 5]),
    "conv1d": _same((3,), inputs="1x64x1024"),
    "conv3d": _same((3, 3, 3), inputs="1x16x8x16x16", channels=(16, 16)),
    "conv_dynw": (f"{X} 64x64x1x1", lambda x, w: mb.conv(x=x, weight=w)),
    "conv_transpose": _transposed((2, 2)), "conv_transpose_k3s2": _transposed((3, 3), pad_type="same"),
    "conv_transpose_1d": _transposed((4,), "1x64x256"),
    "conv_transpose_3d": _transposed((2, 2, 2), "1x16x4x8x8", 16),
    "linear": (ROWS, lambda x: mb.linear(x=x, weight=W(512, 256), bias=_zeros(512))),
    "matmul_const": (ROWS, lambda x: mb.matmul(x=x, y=W(256, 512))),
    "matmul_dyn": _product(f"{ROWS} 1x256x128"), "matmul_dyn_tr": _product(f"{ROWS} {ROWS}", transpose_y=True),
    "matmul_batched4d": _product(f"{HEADS} 1x8x64x128"), "matmul_bc": _product(f"{HEADS} 1x1x64x128"),
    "matmul_f32": _product(f"{ROWS}:fp32 1x256x128:fp32"), "matmul_i32": _product(f"{ROWS}:int32 1x256x128:int32"),
    "sdpa": (f"{HEADS} {HEADS} {HEADS}",
             lambda q, k, v: mb.scaled_dot_product_attention(query=q, key=k, value=v)),
    "sdpa_mask": (f"{HEADS} {HEADS} {HEADS} 1x1x128x128",
                  lambda q, k, v, m: mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m)),
    "lstm": _recurrent("lstm", 4), "gru": _recurrent("gru", 3), "rnn": _recurrent("rnn", 1),
}

_POOLS = {
    "avg_pool": _pool("avg_pool", (2, 2), "valid", 2), "max_pool": _pool("max_pool", (3, 3)),
    "max_pool_k15": _pool("max_pool", (15, 15)), "l2_pool": _pool("l2_pool", (2, 2), "valid", 2),
    "avg_pool3d": _pool("avg_pool", (2, 2, 2), "valid", 2, "1x16x8x16x16"), "global_avg": _reduce("mean", 2, 3),
}

_NORMS = {
    "softmax_c": _norm("softmax", axis=1), "softmax_w": _norm("softmax", axis=3), "softmax_h": _norm("softmax", axis=2),
    "softmax_n": _norm("softmax", "8x64x16x16", axis=0),
    "log_softmax": (X, lambda x: mb.sub(x=x, y=mb.reduce_log_sum_exp(x=x, axes=[1], keep_dims=True))),
    "layer_norm_c": _norm("layer_norm", axes=[1], epsilon=1e-5),
    "layer_norm_w": _norm("layer_norm", ROWS, axes=[2], gamma=np.ones(256, np.float16), beta=_zeros(256),
                          epsilon=np.float16(1e-5)),
    "layer_norm_hw": _norm("layer_norm", axes=[2, 3]), "layer_norm_chw": _norm("layer_norm", axes=[1, 2, 3]),
    "instance_norm": _norm("instance_norm", gamma=np.ones(64, np.float16), beta=_zeros(64)),
    "batch_norm": _norm("batch_norm", mean=_zeros(64), variance=np.ones(64, np.float16)),
    "l2_norm": _norm("l2_norm"), "lrn": _norm("local_response_norm", size=5),
}

_KINDS = "sum mean max min prod l1_norm l2_norm sum_square log_sum log_sum_exp"
_REDUCTIONS = {f"reduce_{kind}_c": _reduce(kind, 1) for kind in _KINDS.split()} | {
    "reduce_sum_w": _reduce("sum", 3), "reduce_sum_all": _reduce("sum", 0, 1, 2, 3),
    "reduce_argmax_c": _argmax(1), "reduce_argmax_w": _argmax(3),
    "cumsum_w": _norm("cumsum", axis=3), "cumsum_c": _norm("cumsum", axis=1),
}

_SWEEPS = {f"sw_conv_k{size}": _same((size, size)) for size in (13, 14, 15, 16)} | {
    f"sw_conv_k1x{size}": _same((1, size)) for size in (9, 10, 11, 12, 13, 14, 15, 16, 17, 24, 32, 64)} | {
    f"sw_conv_k{size}x1": _same((size, 1)) for size in (16, 17, 24, 25, 28, 31, 32, 64)} | {
    f"sw_conv_s{size}": _conv((size, size), strides=[size, size]) for size in (2, 3, 4, 6, 8)} | {
    f"sw_conv_g{groups}": _same((3, 3), channels=(64, 64 // groups), groups=groups) for groups in (2, 4, 8, 16, 32)} | {
    "sw_conv_k1x16_valid": _conv((1, 16)), "sw_conv_k15x15_valid": _conv((15, 15)),
    **{f"sw_{kind[:3]}pool_k{size}": _pool(kind, (size, size))
       for kind in ("max_pool", "avg_pool") for size in (4, 5, 7, 8, 9, 13, 14)},
    "sw_maxpool_k9_valid": _pool("max_pool", (9, 9), "valid"),
    "sw_maxpool_k1x9": _pool("max_pool", (1, 9)), "sw_maxpool_k9x1": _pool("max_pool", (9, 1)),
    **{f"sw_matmul_k{size}": _product(f"1x16x{size} 1x{size}x16")
       for size in (16384, 16385, 32768, 40000, 49152, 65535, 65536)},
}

CASES = table(_MATRICES | _POOLS | _NORMS | _REDUCTIONS | _SWEEPS)
