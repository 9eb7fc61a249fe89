"""Linear algebra of weights, computed during the conversion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check, convert

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
MATRIX = torch.eye(3) * 2 + torch.arange(9.0).reshape(3, 3) / 20


class OfAWeight(nn.Module):
    """x and the results of a function of a weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor = MATRIX) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(weight.clone()), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.function(self.weight)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("function", [
    torch.logdet, torch.det, lambda w: torch.slogdet(w)[1], lambda w: torch.inverse(w).sum(0),
    lambda w: torch.linalg.inv(w).sum(0), lambda w: torch.linalg.pinv(w).sum(0), lambda w: torch.matrix_exp(w).sum(0),
    lambda w: torch.linalg.qr(w)[1].abs().sum(0), lambda w: torch.linalg.cholesky(w @ w.T).sum(0),
    lambda w: torch.linalg.solve(w, torch.ones(3)), lambda w: torch.linalg.svdvals(w),
    lambda w: torch.linalg.eigh(w + w.T)[0], lambda w: torch.lgamma(w).sum(0), lambda w: torch.special.i0(w).sum(0),
], ids="logdet det slogdet inverse inv pinv matrix_exp qr cholesky solve svdvals eigh lgamma i0".split())
def test_functions_of_weights(function: Callable[[torch.Tensor], torch.Tensor], frontend: str) -> None:
    check(OfAWeight(function), X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("map_name", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_parametrizations(map_name: str, frontend: str) -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map=map_name)
    check(layer.eval(), X, frontend=frontend)


LOWER = torch.linalg.cholesky(MATRIX @ MATRIX.T)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("function", [
    lambda x: torch.linalg.solve_triangular(LOWER, x.T, upper=False),
    lambda x: torch.linalg.solve_triangular(LOWER.T, x, upper=True, left=False),
    lambda x: torch.linalg.solve_triangular(LOWER[None], x.T[None], upper=False, unitriangular=True),
    lambda x: torch.linalg.solve(MATRIX, x.T), lambda x: torch.linalg.solve(MATRIX, x, left=False),
    lambda x: torch.cholesky_solve(x.T, LOWER),
], ids=["lower", "upper from the right", "batch", "solve", "from the right", "cholesky"])
def test_equations_with_a_constant_matrix(function: Callable[[torch.Tensor], torch.Tensor], frontend: str) -> None:
    check(function, X, frontend=frontend, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("upper, left", [(False, True), (True, True), (True, False), (False, False)])
def test_equations_with_a_computed_triangular_matrix(upper: bool, left: bool, size: int, frontend: str) -> None:
    """What is beside the triangle, and its diagonal, is not read."""
    def solve(matrix: torch.Tensor, sides: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(matrix * 0.2, sides, upper=upper, left=left, unitriangular=True)

    random = torch.Generator().manual_seed(0)
    check(solve, torch.rand(2, size, size, generator=random), torch.randn(1, size, size, generator=random),
          frontend=frontend, atol=1e-4)


def delta_rule_matrix(tokens: torch.Tensor) -> torch.Tensor:
    keys = nn.functional.normalize(tokens, dim=-1)
    return (keys @ keys.transpose(-1, -2) * 0.9).tril(-1)


@pytest.mark.parametrize("matrix", [
    torch.full((32, 32), 0.9), delta_rule_matrix(torch.ones(64, 8)),
    delta_rule_matrix(torch.ones(64, 8) + 0.1 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))),
    delta_rule_matrix(torch.linspace(0, 6, 64)[:, None] + torch.arange(8.0)),
], ids=["0.9", "equal tokens", "similar tokens", "slow signal"])
def test_numbers_of_one_sign_do_not_cancel(matrix: torch.Tensor) -> None:
    """The powers of such a matrix grow far beyond its inverse."""
    check(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True), matrix,
          torch.randn(len(matrix), 2, generator=torch.Generator().manual_seed(1)), atol=1e-5)


def test_equations_with_a_computed_diagonal_are_refused() -> None:
    with pytest.raises(NotConverted, match="diagonal may have other numbers than ones; divide its rows"):
        convert(lambda x: torch.linalg.solve_triangular(x.T @ x, x.T, upper=False), [X])


def test_equations_with_a_matrix_of_flexible_size_are_refused() -> None:
    with pytest.raises(NotConverted, match="solves equations with a matrix of a flexible size; fix this size"):
        convert(lambda x: torch.linalg.solve_triangular(x @ x.T, x, upper=False, unitriangular=True), [X],
                flexible=[0])


def test_the_density_of_a_normal_distribution() -> None:
    normal = torch.distributions.MultivariateNormal(torch.arange(3.0), covariance_matrix=MATRIX @ MATRIX.T)
    check(lambda x: normal.log_prob(x), X, atol=1e-5)


@pytest.mark.parametrize(("function", "frontend", "reason"), [
    (lambda x: torch.linalg.solve(x.T @ x + torch.eye(3), x.T), "trace", "is implemented for constants only"),
    (lambda x: torch.linalg.solve(MATRIX - MATRIX, x.T), "export", "torch cannot invert its matrix .*singular"),
    (lambda x: torch.linalg.solve_triangular(LOWER - LOWER, x.T, upper=False), "trace", "matrix without an inverse"),
], ids=["computed", "singular", "zeros"])
def test_other_equations_are_refused(
    function: Callable[[torch.Tensor], torch.Tensor], frontend: str, reason: str
) -> None:
    with pytest.raises(NotConverted, match=reason):
        convert(function, [X], frontend)


def test_functions_of_what_the_model_computes_are_refused() -> None:
    with pytest.raises(NotConverted, match="is implemented for constants only, and the model computes its operands"):
        convert(lambda x: torch.logdet(x.T @ x + torch.eye(3)), [X])


def test_a_singular_weight_is_refused() -> None:
    with pytest.raises(NotConverted, match="torch cannot compute it .*singular"):
        convert(OfAWeight(lambda w: torch.inverse(w - w).sum(0)), [X], "export")
