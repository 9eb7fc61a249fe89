"""`arange` and `linspace` of torch's dtype."""

from __future__ import annotations

import pytest
import torch

from ..checks import check

X = torch.rand(3, 4)
FLOAT = torch.float32


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_the_dtype_counts(frontend: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = x + torch.arange(4, dtype=FLOAT).mean() + torch.linspace(0, 5, 4, dtype=torch.int64) / 2
        return mean, x * torch.softmax(torch.arange(1, 5, dtype=FLOAT), 0), x[:, torch.arange(0.0, 3, dtype=torch.long)]

    mlmodel = check(model, X, frontend=frontend)
    assert "range_1d" not in {op.op_type for op in mlmodel._mil_program.functions["main"].operations}


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_steps(frontend: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x = x + torch.arange(4) + torch.arange(1, 9, 2) + torch.arange(3, -1, -1) + torch.arange(0, 1, 0.25)
        return x + torch.linspace(-1, 1, 4) + torch.arange(0.1, 0.5, 0.1)

    check(model, X, frontend=frontend)


def test_a_script() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(x.size(1), dtype=torch.float32)
        return x + numbers.mean() + torch.arange(1, 5) + torch.arange(0, 8, 2, dtype=torch.float32).mean()

    check(model, X, frontend="script")


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_flexible_size(frontend: str) -> None:
    check(lambda x: x + torch.arange(x.shape[1], dtype=x.dtype).mean() + torch.arange(1, x.shape[1] + 1), X,
          frontend=frontend, flexible=[1], at=[(torch.rand(3, 7),)])


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_step_that_single_precision_rounds_down(frontend: str) -> None:
    check(lambda x: x + torch.arange(0, 1, 1 / 11), torch.rand(2, 11), frontend=frontend)
