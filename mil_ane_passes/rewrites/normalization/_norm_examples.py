"""Example norms of `scaled_rms_norm` and `representable_epsilon`; `half` makes a number of the program's dtype."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var, types

from ...passes.examples import build_program

__all__ = [
    "build_batch_norm",
    "build_computed_sum_norm",
    "build_divided_norm",
    "build_dropped_axes_norm",
    "build_fraction",
    "build_l2_norm",
    "build_logarithm",
    "build_norm_op",
    "build_norm_program",
    "build_observed_norm",
    "build_plain_l2_norm",
    "build_prescaled_norm",
    "build_reciprocal_norm",
    "build_reciprocal_root",
    "build_restored_axes_norm",
    "build_rsqrt_epsilon_norm",
    "build_shared_factor_norm",
    "build_tanh_norm",
    "build_torch_normalize",
    "build_unrelated_product",
]


def build_llama_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.pow(x=x, y=half(2)), axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=Builder.add(x=mean, y=half(2.0**-20)), epsilon=half(2.0**-24)), name="y")


def build_divided_norm(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=Builder.mul(x=x, y=x), axes=[-1], keep_dims=True)
    mean = Builder.add(x=half(1e-5), y=Builder.real_div(x=total, y=half(8)))
    return Builder.real_div(x=x, y=Builder.add(x=Builder.sqrt(x=mean), y=half(1e-3)), name="y")


def build_reciprocal_norm(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum_square(x=x, axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.maximum(x=Builder.mul(x=total, y=half(0.125)), y=half(1e-4)))
    return Builder.mul(x=Builder.inverse(x=root, epsilon=half(1e-4)), y=x, name="y")


def build_plain_l2_norm(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.sqrt(x=total), name="y")


def build_prescaled_norm(x: Var, half: Any) -> Var:
    most = Builder.reduce_max(x=Builder.abs(x=x), axes=[-1], keep_dims=True)
    mean = Builder.reduce_mean(x=Builder.square(x=Builder.real_div(x=x, y=most)), axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.add(x=mean, y=half(1e-5)))
    return Builder.real_div(x=x, y=Builder.mul(x=root, y=most), name="y")


def build_tanh_norm(x: Var, half: Any) -> Var:
    return build_llama_norm(Builder.tanh(x=x), half)


def build_l2_norm(x: Var, half: Any) -> Var:
    return Builder.real_div(x=x, y=Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True), name="y")


def build_dropped_axes_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[0, 1], keep_dims=False)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=half(1e-5)), name="y")


def build_restored_axes_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=False)
    root = Builder.rsqrt(x=Builder.add(x=mean, y=half(1e-5)), epsilon=half(2.0**-24))
    return Builder.mul(x=x, y=Builder.expand_dims(x=root, axes=[-1]), name="y")


def build_computed_sum_norm(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    total = Builder.add(x=mean, y=Builder.reduce_max(x=x, axes=[-1], keep_dims=True), name="total")
    return Builder.mul(x=x, y=Builder.rsqrt(x=total, epsilon=half(1e-5)), name="y")


def build_norm_program(
    body: Any = build_llama_norm, dtype: Any = np.float16, width: int = 8, opset: Any = ct.target.iOS17
) -> Program:
    kind = types.numpy_type_to_builtin_type(dtype)
    return build_program(lambda x: body(x, dtype), dtype=kind, opset=opset, x=(2, 3, width))


def build_shared_factor_norm() -> Program:
    def body(x: Var) -> list[Var]:
        less = Builder.sub(x=x, y=Builder.reduce_mean(x=x, axes=[-1], keep_dims=True))
        mean = Builder.reduce_mean(x=Builder.square(x=less), axes=[-1], keep_dims=True)
        factor = Builder.rsqrt(x=mean, epsilon=np.float16(1e-4))
        return [Builder.mul(x=less, y=factor, name="y"), Builder.mul(x=factor, y=x, name="z")]

    return build_program(body, x=(2, 3, 8))


def build_norm_op(kind: str, dtype: Any = np.float16, opset: int = 17, **parameters: Any) -> Program:
    """Build one normalization op with its own epsilon."""
    if kind == "layer_norm":
        parameters["axes"] = [-1]
    target = ct.target.iOS15 if opset == 15 else ct.target.iOS17
    return build_program(lambda x: getattr(Builder, kind)(x=x, name="y", **parameters), opset=target,
                         dtype=types.numpy_type_to_builtin_type(dtype), x=(2, 3, 4, 16))


def build_batch_norm(variance: float) -> Program:
    return build_norm_op("batch_norm", mean=np.zeros(3, np.float32), variance=np.full(3, variance, np.float32),
                         epsilon=np.float32(1e-12))


def build_rsqrt_epsilon_norm(x: Var, half: Any) -> Var:
    """Build a norm whose only epsilon is that of rsqrt."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12), name="root"), name="y")


def build_observed_norm(x: Var, half: Any) -> list[Var]:
    y = build_rsqrt_epsilon_norm(x, half)
    return [y, Builder.identity(x=y.op.y, name="z")]


def build_unrelated_product(x: Var, half: Any) -> Var:
    """Multiply another value by the root of the mean of squares of x."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=Builder.cos(x=x), y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12)), name="y")


def build_torch_normalize(x: Var, half: Any) -> Var:
    """Build a norm as torch's normalize."""
    norm = Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.maximum(x=norm, y=half(2.0**-24)), name="y")


def build_fraction(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.add(x=total, y=half(2.0**-24)), name="y")


def build_logarithm(x: Var, half: Any) -> Var:
    return Builder.log(x=Builder.square(x=x), epsilon=np.float32(1e-10), name="y")


def build_reciprocal_root(x: Var, half: Any) -> Var:
    return Builder.rsqrt(x=Builder.abs(x=x), epsilon=np.float32(1e-12), name="y")
