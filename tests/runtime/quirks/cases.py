"""One small program for each quirk that shows it, and one that just does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from tests.runtime.helpers import draw

PRECISIONS = ("float64", "float32", "float16")


class Case(NamedTuple):
    """`build` of `x` fires on `fires` and does not on `spared`."""

    build: Callable[[Any], Any]
    fires: Any
    spared: Any


def deconvolved(bias: bool = False, pad: tuple[int, int] = (0, 0)) -> Callable[[Any], Any]:
    """A 1-D transposed convolution of a (1, 3, n) input, fp16."""
    options: dict[str, Any] = {"bias": np.array([3.0, -5.0], np.float16)} if bias else {}
    weight = draw(7, 3, 2, 5, dtype=np.float16)
    return lambda x: mb.conv_transpose(
        x=x, weight=weight.astype(_type(x)), strides=[3], pad=list(pad), pad_type="custom",
        **{name: value.astype(_type(x)) for name, value in options.items()},
    )


def _type(x: Any) -> Any:
    from coremltools.converters.mil.mil import types

    return types.nptype_from_builtin(x.dtype)


def _column(*values: float) -> Any:
    return np.array([values], np.float16)


def _linear(x: Any) -> Any:
    return mb.linear(x=x, weight=np.ones((1, x.shape[-1]), _type(x)))


def _log_softmax(x: Any) -> Any:
    return mb.log(x=mb.softmax(x=x, axis=-1))


def _masked(x: Any) -> Any:
    mask = np.full((1, 4), -np.inf if x.shape[-1] == 4 else 0.0, np.float16)[:, : x.shape[-1]]
    return mb.softmax(x=mb.add(x=x, y=mask.astype(_type(x))), axis=-1)


CASES = {
    "asymmetric_conv_transpose_pad": Case(
        deconvolved(pad=(1, 0)), draw(0, 1, 3, 6, dtype=np.float16), np.zeros((1, 3, 6), np.float16)),
    "conv_transpose_1d_bias": Case(
        deconvolved(bias=True), draw(0, 1, 3, 6, dtype=np.float16), draw(0, 1, 3, 2, dtype=np.float16)),
    "exp_overflow": Case(lambda x: mb.exp(x=x), _column(12.0), _column(11.0)),
    "infinite_mask": Case(_masked, _column(1.0, 2.0, 3.0, 4.0), _column(1.0, 2.0, 3.0)),
    "last_axis_slice_4094": Case(
        lambda x: mb.slice_by_index(x=x, begin=[0, 1], end=[0, 0], end_mask=[True, True]),
        _column(1.0, 4096.0, -5000.0), _column(65504.0, 4094.0, -4094.0)),
    "log_softmax_underflow": Case(_log_softmax, _column(0, 0, 0, 50, 40, 0, 0, 0), _column(0, 0, 0, 7, 0, 0, 0, 0)),
    "log_sum_exp_cliff": Case(
        lambda x: mb.reduce_log_sum_exp(x=x, axes=[1]), np.full((2, 32), 7.64, np.float16),
        np.full((2, 32), 7.617, np.float16)),
    "mac_overflow_32768": Case(_linear, _column(16384, 16384, -16384, -16384, 1), _column(16384, 16368, -16384, 1)),
    "narrow_reduce_sum": Case(
        lambda x: mb.reduce_sum(x=x, axes=[1], keep_dims=True), np.ones((1, 2060), np.float16),
        np.ones((1, 2048), np.float16)),
    "softplus_cliff": Case(lambda x: mb.softplus(x=x), _column(10.41, 20.0), _column(-3.0, 10.39)),
    "square_overflow": Case(lambda x: mb.square(x=x), _column(257.0, -300.0), _column(255.9)),
}
