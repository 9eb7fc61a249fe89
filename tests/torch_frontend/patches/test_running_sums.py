"""cumsum along any axis."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from tests.torch_frontend.checks import check  # noqa: E402

X = torch.arange(-12.0, 12.0).reshape(2, 3, 4)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_an_axis_counted_from_the_end(frontend):
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, -2)

    check(model, X, frontend=frontend)


@pytest.mark.parametrize("axis", [0, 2, -1, -3])
def test_any_axis_of_bools_and_integers(axis):
    check(lambda x: (torch.cumsum(x > 0, axis) // 2, torch.cumsum(x.int(), axis, dtype=torch.float32) / 2), X,
          flexible=(0,), at=[(torch.randn(5, 3, 4),)])
