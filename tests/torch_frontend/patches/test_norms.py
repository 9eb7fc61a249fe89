"""Norms of vectors and matrices, with and without their default arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import FRONTENDS, check, convert, outputs

X = torch.tensor([[[3.0, -4, 0, 1], [0, 2, -1, 0.5]], [[-2, 0, 0, 1], [1, 1, -1, 1]], [[0, 0, 0, 0], [5, -7, 1, 2]]])
LINALG = torch.linalg
INF = math.inf


def norms_of_tensors(x: torch.Tensor):
    return (x.norm(), torch.norm(x), x.norm(p=1), x.norm(3), x.norm(0) / 2.0, x.norm(dim=1), x.norm(2, -1),
            x.norm(1, 0, True), x.norm(dim=[0, 2]), x.norm(2, [1, 2], True), torch.norm(x, 1, 2),
            x.norm(p=1, dim=1, keepdim=True), x.norm(p=2, dim=1, dtype=torch.float32), x[0, 0].norm(),
            x[0, 0, 1].norm())


def norms_of_vectors(x: torch.Tensor):
    return (LINALG.vector_norm(x), LINALG.vector_norm(x, 1), LINALG.vector_norm(x, 3, 1),
            LINALG.vector_norm(x, 2, [0, 1], True), LINALG.vector_norm(x, dim=2), LINALG.vector_norm(x, keepdim=True),
            LINALG.vector_norm(x, 0, 2) / 2.0, LINALG.vector_norm(x, dtype=torch.float32),
            LINALG.vector_norm(x[0, 0, 1]), LINALG.vector_norm(x[0, 0, 0], 1))


def norms_of_matrices(x: torch.Tensor):
    y = x[0]
    return (LINALG.matrix_norm(x), LINALG.matrix_norm(x, 1), LINALG.matrix_norm(x, -1, [0, 1]),
            LINALG.matrix_norm(x, 1, [2, 0], True), LINALG.matrix_norm(y, "fro", keepdim=True),
            LINALG.matrix_norm(x, -1, [-1, 0]), LINALG.norm(x), LINALG.norm(y), LINALG.norm(y, 1), LINALG.norm(y, -1),
            LINALG.norm(y, "fro"), LINALG.norm(x, "fro", [0, 2]), LINALG.norm(x, 1, [1, 2], True),
            LINALG.norm(x, dim=1), LINALG.norm(x, dim=[1, 2]), LINALG.norm(x, 3, 1), LINALG.norm(y[0], 1),
            LINALG.norm(y[0]), LINALG.norm(x, keepdim=True), LINALG.norm(y, 1, keepdim=True),
            LINALG.norm(x, dtype=torch.float32), torch.norm(y), torch.norm(y, "fro"), torch.norm(x, "fro", [0, 1]))


def infinite_norms(x: torch.Tensor):
    y = x[0]
    return (x.norm(INF), x.norm(-INF, 1), torch.norm(x, p=INF, dim=2), LINALG.vector_norm(x, INF),
            LINALG.vector_norm(x, -INF, [0, 1], True), LINALG.matrix_norm(y, INF, keepdim=True),
            LINALG.matrix_norm(x, -INF), LINALG.matrix_norm(x, INF, [2, 0]), LINALG.norm(y, INF),
            LINALG.norm(y, -INF, keepdim=True), LINALG.norm(x, INF, 1), LINALG.norm(x, -INF, [0, 1]))


def script_with_infinity(x: torch.Tensor):
    order = float("inf")
    return (x.norm(order), x.norm(order, 1), torch.linalg.vector_norm(x, order), torch.linalg.vector_norm(x, -order),
            torch.linalg.matrix_norm(x, order), torch.linalg.matrix_norm(x, -order, [0, 1], True),
            torch.linalg.norm(x, order, [0, 1]), torch.linalg.norm(x[0], order))


def script_norms(x: torch.Tensor):
    y = x[0]
    return (x.norm(), x.norm(1), x.norm(3.0), x.norm(2, 1), x.norm(2, [0, 1], True), x.norm(dim=1, p=1),
            x.norm(0) / 2.0, torch.norm(x), torch.norm(x, dim=1), torch.norm(x, 1, 1, True), torch.norm(y, "fro"),
            torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, 1, [1]), torch.linalg.matrix_norm(x),
            torch.linalg.matrix_norm(x, 1), torch.linalg.matrix_norm(x, "fro", [0, 1]), torch.linalg.norm(x),
            torch.linalg.norm(y, 1), torch.linalg.norm(y, "fro"), torch.linalg.norm(x, None, [1]),
            torch.frobenius_norm(x, [1]), torch.frobenius_norm(y, [0, 1], True))


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("norms", [norms_of_tensors, norms_of_vectors, norms_of_matrices, infinite_norms],
                         ids=lambda norms: norms.__name__)
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_norms(frontend: str, norms: Callable[..., Any], precision: object) -> None:
    rounding = {"rtol": 2e-3} if precision == ct.precision.FLOAT16 else {}  # of the exponent 1 / 3
    check(norms, X, frontend=frontend, precision=precision, **rounding)


@pytest.mark.parametrize("norms", [script_norms, script_with_infinity], ids=lambda norms: norms.__name__)
def test_norms_in_scripts(norms: Callable[..., Any]) -> None:
    check(norms, X, frontend="script")


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_norms_of_flexible_sizes(frontend: str) -> None:
    def norms(x: torch.Tensor):
        return (x.norm(), x.norm(2, [1]), x.norm(1, [1, 2], True), torch.linalg.matrix_norm(x, 1),
                torch.linalg.vector_norm(x, 1), torch.linalg.norm(x, 1, [1, 2]))

    check(norms, X, frontend=frontend, flexible=[1], at=[[torch.randn(3, 5, 4)]])


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("norm", [
    lambda x: torch.linalg.matrix_norm(x, "nuc"), lambda x: torch.linalg.matrix_norm(x, 2),
    lambda x: torch.linalg.matrix_norm(x, -2.0), lambda x: torch.linalg.norm(x, 2),
    lambda x: torch.linalg.norm(x, "nuc"), lambda x: torch.norm(x, "nuc"), lambda x: torch.nuclear_norm(x)])
def test_norms_of_singular_values_are_rejected(norm: Callable[..., Any], frontend: str) -> None:
    with pytest.raises(NotConverted, match=r".py:\d+\): .*singular values.*; "):
        convert(norm, [X[0]], frontend)


def test_a_scripted_norm_of_singular_values_is_rejected() -> None:
    def norm(x: torch.Tensor):
        return torch.linalg.matrix_norm(x, "nuc")

    with pytest.raises(NotConverted, match=r".py:\d+\): .*singular values.*; "):
        convert(norm, [X[0]], "script")


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_norms_of_singular_values_of_constants(frontend: str) -> None:
    def norms(x: torch.Tensor):
        weight = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
        return x / torch.linalg.matrix_norm(weight, 2), x + torch.linalg.norm(weight, "nuc")

    check(norms, X, frontend=frontend)


def spreads_and_norms(x: torch.Tensor):
    spread, mean = torch.std_mean(x, -1)
    return x.std(), x.std(1), x.std((0, 2), correction=0, keepdim=True), spread, mean, x.norm(3, 1), x.norm(2.5)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("scale", [1e-3, 1, 300])
def test_no_square_and_no_power_leaves_the_range_of_fp16(scale, frontend):
    x = (torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0)) * scale).half().float()
    mlmodel = convert(spreads_and_norms, [x], frontend, precision=ct.precision.FLOAT16)
    for found, wanted in zip(outputs(mlmodel, [x], "float16"), spreads_and_norms(x), strict=True):
        largest = float(wanted.abs().max())
        np.testing.assert_allclose(np.reshape(found, wanted.shape), wanted, rtol=0, atol=0.01 * largest)


@pytest.mark.parametrize("scale", [1e-3, 100, 300])
@pytest.mark.parametrize("shape, flexible", [((70000,), ()), ((70000,), (0,)), ((3, 200, 200), ())])
def test_spreads_of_many_numbers_are_those_of_torch_at_fp16(scale, shape, flexible):
    """Neither the root of their number nor the number itself, from 65520 on, leaves the range."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale).half().float()
    inputs = [ct.TensorType("x", tuple(ct.RangeDim(2, 80000, default=size) if axis in flexible else size
                                       for axis, size in enumerate(shape)))]
    mlmodel = convert(lambda x: (x.std(), x.std(-1), (x / scale).var()), [x], precision=ct.precision.FLOAT16,
                      inputs=inputs)
    expected = x.std(), x.std(-1), (x / scale).var()
    for found, wanted in zip(outputs(mlmodel, [x], "float16"), expected, strict=True):
        np.testing.assert_allclose(np.reshape(found, wanted.shape), wanted, rtol=0.01)


def test_norms_of_no_and_infinite_numbers():
    check(lambda x: (x.std(), x.std(1), x.norm(3, 1), x.norm(3)), torch.zeros(2, 3, 4))
    check(lambda x: (x.norm(3, 1), x.norm(3)), torch.tensor([[0., INF], [1., 2.]]))


def test_spreads_of_flexible_and_too_small_sizes():
    check(lambda x: (x.std(0), x.std(1), x.std()), X[0], flexible=[0], at=[(torch.rand(7, 4),)])
    check(lambda x: (x.std(0, correction=1), x.std(0, correction=0)), X[:1])
