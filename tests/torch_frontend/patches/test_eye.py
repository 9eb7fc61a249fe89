"""eye keeps its dtype."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from tests.torch_frontend.checks import check  # noqa: E402

X = torch.tensor([[3, 5, 8], [7, 9, 2]], dtype=torch.int32)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_integers_stay_integers(frontend):
    def model(x: torch.Tensor) -> torch.Tensor:
        return x // (torch.eye(2, 3, dtype=torch.int32) + 1)

    check(model, X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_mask_of_bools(frontend):
    def model(x: torch.Tensor) -> torch.Tensor:
        q = x.float().view(1, 2, 3)
        mask = torch.eye(2, dtype=torch.bool)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask) + torch.eye(3)[1]

    check(model, X, frontend=frontend)
