"""The norms that `scaled_rms_norm` and `representable_epsilon` show; `half` makes a number of the program's dtype."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var, types

from ..core.examples import program

__all__ = [
    "batch_normalised", "bounded", "computed", "divided", "dropped", "foreign", "fraction", "hosts", "kept_small",
    "l2_norm",
    "logarithm", "normalised", "observed", "plain_l2", "put_back", "reciprocal", "reciprocal_root", "rms",
    "two_readers",
    "unprotected",
]


def llama(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.pow(x=x, y=half(2)), axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=Builder.add(x=mean, y=half(2.0**-20)), epsilon=half(2.0**-24)), name="y")


def divided(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=Builder.mul(x=x, y=x), axes=[-1], keep_dims=True)
    mean = Builder.add(x=half(1e-5), y=Builder.real_div(x=total, y=half(8)))
    return Builder.real_div(x=x, y=Builder.add(x=Builder.sqrt(x=mean), y=half(1e-3)), name="y")


def reciprocal(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum_square(x=x, axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.maximum(x=Builder.mul(x=total, y=half(0.125)), y=half(1e-4)))
    return Builder.mul(x=Builder.inverse(x=root, epsilon=half(1e-4)), y=x, name="y")


def plain_l2(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.sqrt(x=total), name="y")


def hosts(x: Var, half: Any) -> Var:
    most = Builder.reduce_max(x=Builder.abs(x=x), axes=[-1], keep_dims=True)
    mean = Builder.reduce_mean(x=Builder.square(x=Builder.real_div(x=x, y=most)), axes=[-1], keep_dims=True)
    root = Builder.sqrt(x=Builder.add(x=mean, y=half(1e-5)))
    return Builder.real_div(x=x, y=Builder.mul(x=root, y=most), name="y")


def kept_small(x: Var, half: Any) -> Var:
    return llama(Builder.tanh(x=x), half)


def l2_norm(x: Var, half: Any) -> Var:
    return Builder.real_div(x=x, y=Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True), name="y")


def dropped(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[0, 1], keep_dims=False)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=half(1e-5)), name="y")


def put_back(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=False)
    root = Builder.rsqrt(x=Builder.add(x=mean, y=half(1e-5)), epsilon=half(2.0**-24))
    return Builder.mul(x=x, y=Builder.expand_dims(x=root, axes=[-1]), name="y")


def computed(x: Var, half: Any) -> Var:
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    total = Builder.add(x=mean, y=Builder.reduce_max(x=x, axes=[-1], keep_dims=True), name="total")
    return Builder.mul(x=x, y=Builder.rsqrt(x=total, epsilon=half(1e-5)), name="y")


def rms(body: Any = llama, dtype: Any = np.float16, width: int = 8, opset: Any = ct.target.iOS17) -> Program:
    kind = types.numpy_type_to_builtin_type(dtype)
    return program(lambda x: body(x, dtype), dtype=kind, opset=opset, x=(2, 3, width))


def two_readers() -> Program:
    def body(x: Var) -> list[Var]:
        less = Builder.sub(x=x, y=Builder.reduce_mean(x=x, axes=[-1], keep_dims=True))
        mean = Builder.reduce_mean(x=Builder.square(x=less), axes=[-1], keep_dims=True)
        factor = Builder.rsqrt(x=mean, epsilon=np.float16(1e-4))
        return [Builder.mul(x=less, y=factor, name="y"), Builder.mul(x=factor, y=x, name="z")]

    return program(body, x=(2, 3, 8))


def normalised(kind: str, dtype: Any = np.float16, opset: int = 17, **parameters: Any) -> Program:
    """One op that normalises, its epsilon as given."""
    if kind == "layer_norm":
        parameters["axes"] = [-1]
    target = ct.target.iOS15 if opset == 15 else ct.target.iOS17
    return program(lambda x: getattr(Builder, kind)(x=x, name="y", **parameters), opset=target,
                   dtype=types.numpy_type_to_builtin_type(dtype), x=(2, 3, 4, 16))


def batch_normalised(variance: float) -> Program:
    return normalised("batch_norm", mean=np.zeros(3, np.float32), variance=np.full(3, variance, np.float32),
                      epsilon=np.float32(1e-12))


def unprotected(x: Var, half: Any) -> Var:
    """No epsilon but the one of rsqrt."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=x, y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12), name="root"), name="y")


def observed(x: Var, half: Any) -> list[Var]:
    y = unprotected(x, half)
    return [y, Builder.identity(x=y.op.y, name="z")]


def foreign(x: Var, half: Any) -> Var:
    """Something else by the root of the mean of squares of x."""
    mean = Builder.reduce_mean(x=Builder.square(x=x), axes=[-1], keep_dims=True)
    return Builder.mul(x=Builder.cos(x=x), y=Builder.rsqrt(x=mean, epsilon=np.float32(1e-12)), name="y")


def bounded(x: Var, half: Any) -> Var:
    """As torch's normalize."""
    norm = Builder.reduce_l2_norm(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.maximum(x=norm, y=half(2.0**-24)), name="y")


def fraction(x: Var, half: Any) -> Var:
    total = Builder.reduce_sum(x=x, axes=[-1], keep_dims=True)
    return Builder.real_div(x=x, y=Builder.add(x=total, y=half(2.0**-24)), name="y")


def logarithm(x: Var, half: Any) -> Var:
    return Builder.log(x=Builder.square(x=x), epsilon=np.float32(1e-10), name="y")


def reciprocal_root(x: Var, half: Any) -> Var:
    return Builder.rsqrt(x=Builder.abs(x=x), epsilon=np.float32(1e-12), name="y")
