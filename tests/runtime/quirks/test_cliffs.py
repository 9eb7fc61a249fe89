"""The cliffs of exponentials and squares: published symptoms, and the first value on either side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

from tests.runtime.helpers import close, run
from tests.runtime.quirks.cases import PRECISIONS

GRID = np.linspace(-15, 15, 2000).astype(np.float16)[None]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_softplus_drops_between_10_and_10_point_4(precision: str) -> None:
    x = np.array([[5, 10, 10.39, 10.41, 11, 12, 88, 1000]], np.float16)
    found = run(lambda x: mb.softplus(x=x), {"x": x}, precision=precision, quirks=["softplus_cliff"])[0]
    right = torch.nn.functional.softplus(torch.from_numpy(x).double()).numpy()
    close(found, np.where(x < 10.4, right, 0.0), 1e-3 if precision == "float16" else 1e-6)


def test_mish_falls_with_the_softplus_in_it() -> None:
    def mish(x: Any) -> Any:
        return mb.mul(x=x, y=mb.tanh(x=mb.softplus(x=x)))

    found = run(mish, {"x": GRID}, quirks=["softplus_cliff"])[0]
    right = torch.nn.functional.mish(torch.from_numpy(GRID).double()).numpy()
    close(found, np.where(GRID < 10.4, right, 0.0), 1e-9)


def test_other_softplus_are_not_struck() -> None:
    def build(x: Any) -> Any:
        stable = mb.add(x=mb.relu(x=x), y=mb.log(x=mb.add(x=mb.exp(x=mb.sub(x=np.float16(0), y=mb.abs(x=x))),
                                                       y=np.float16(1))))
        ones = np.ones(1, np.float16)
        return stable, mb.softplus_parametric(x=mb.expand_dims(x=x, axes=[-1]), alpha=np.ones(1, np.float16), beta=ones)

    x = np.array([[12.0]], np.float16)
    for found in run(build, {"x": x}, quirks=["softplus_cliff", "exp_overflow", "log_softmax_underflow"]):
        close(found.reshape(1, 1), np.log1p(np.exp(x.astype(float))), 1e-6)


@pytest.mark.parametrize("channels", [1, 32, 256])
@pytest.mark.parametrize("keep", [True, False])
def test_log_sum_exp_drops_where_the_sum_overflows(channels: int, keep: bool) -> None:
    x = np.repeat(GRID[:, None, :], channels, axis=1)

    def build(x: Any) -> Any:
        return mb.reduce_log_sum_exp(x=x, axes=[1], keep_dims=keep)

    found = run(build, {"x": x}, quirks=["log_sum_exp_cliff"])[0]
    right = torch.logsumexp(torch.from_numpy(x).double(), 1, keepdim=keep).numpy()
    # Rounding to fp16 overflows at 65520; the reports say 65504, its largest number. No point of the grid lies between.
    cliff = np.log(65504 / channels)
    close(found, np.where(GRID.reshape(found.shape) < cliff, right, 0.0), 1e-9)
    assert (found == 0).any() and (found > 11).any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_softmax_is_infinite_beside_a_dominant_class(precision: str) -> None:
    x = np.array([[0, 0, 0, 50, 0, 0, 0, 0]], np.float16)

    def build(x: Any) -> Any:
        return mb.log(x=mb.softmax(x=x, axis=-1))

    found = run(build, {"x": x}, precision=precision, quirks=["log_softmax_underflow"])[0]
    np.testing.assert_array_equal(found, np.where(x == 50, 0.0, -np.inf))


def test_probabilities_below_the_smallest_normal_number_are_lost() -> None:
    x = np.array([[0.0, -9.5, -9.8]], np.float16)
    found = run(lambda x: mb.softmax(x=x, axis=-1), {"x": x}, quirks=["log_softmax_underflow"])[0]
    right = torch.softmax(torch.from_numpy(x).double(), -1).numpy()
    assert right[0, 1] > 2.0**-14 > right[0, 2]
    close(found, [[right[0, 0], right[0, 1], 0.0]], 1e-12)


def test_a_large_enough_epsilon_saves_the_logarithm() -> None:
    x = np.zeros((1, 2), np.float16)
    found = run(lambda x: mb.log(x=x, epsilon=np.float16(1e-4)), {"x": x}, quirks=["log_softmax_underflow"])[0]
    close(found, np.full((1, 2), np.log(float(np.float16(1e-4)))), 1e-9)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_cumulative_sum_of_exp_is_infinite_above_11_09(precision: str) -> None:
    def build(x: Any) -> Any:
        return mb.log(x=mb.cumsum(x=mb.exp(x=x), axis=1))

    x = np.array([[1, 5, 10, 12, 15, 20, 50]], np.float16)
    found = run(build, {"x": x}, precision=precision, quirks=["exp_overflow"])[0]
    assert np.isfinite(found[0, :3]).all() and np.isposinf(found[0, 3:]).all()


def _square(spelling: str, x: Any) -> Any:
    if spelling == "pow":
        return mb.pow(x=x, y=np.float16(2))
    return mb.square(x=x) if spelling == "square" else mb.mul(x=x, y=x)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("spelling", ["square", "mul", "pow"])
def test_a_spelled_rms_norm_above_256_is_zero(spelling: str, precision: str) -> None:
    def norm(x: Any) -> Any:
        mean = mb.reduce_mean(x=_square(spelling, x), axes=[-1], keep_dims=True)
        return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-5)))

    x = np.array([[1, 2, 3, 255], [1, 2, 3, 257]], np.float16)
    found = run(norm, {"x": x}, precision=precision, quirks=["square_overflow"])[0]
    wide = x.astype(float)
    right = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    close(found[0], right[0], 3e-3 if precision == "float16" else 1e-5)
    np.testing.assert_array_equal(found[1], 0.0)


def test_what_is_no_square_and_the_fused_norms_are_spared() -> None:
    x = np.full((1, 1, 1, 4), 300, np.float16)

    def build(x: Any) -> Any:
        return (mb.mul(x=x, y=np.float16(300)), mb.pow(x=x, y=np.float16(3)), mb.reduce_l2_norm(x=x, axes=[-1]),
                mb.l2_norm(x=x, epsilon=np.float16(1e-4)), mb.reduce_sum_square(x=x, axes=[-1]))

    for right, found in zip(run(build, {"x": x}), run(build, {"x": x}, quirks=["square_overflow"])):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, right)
