"""Mixtures of experts: grouped products and counts of the rows of each expert."""

from __future__ import annotations

import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend.errors import NotConverted

from ..checks import captured, check, input_types

torch.manual_seed(0)
WEIGHTS = torch.randn(3, 8, 4)


def multiply_groups(x: torch.Tensor) -> torch.Tensor:
    """Rows ordered by their largest element, as a router orders them."""
    expert, order = x[:, :3].argmax(-1).sort()
    counts = torch.histc(expert.float(), bins=3, min=0, max=2)
    return torch._grouped_mm(x[order], WEIGHTS, counts.cumsum(0).int())


@pytest.mark.parametrize("rows", [7, 3, 1])
def test_groups(rows: int) -> None:
    mlmodel = check(multiply_groups, torch.randn(rows, 8))
    products = mlmodel._mil_program.functions["main"].find_ops(op_type="matmul")
    assert [op.y.shape for op in products] == [(3 * 8, 4) if rows > 3 else (rows, 8, 4)]


def test_groups_that_are_empty() -> None:
    ends = torch.tensor([0, 6, 6], dtype=torch.int32)
    check(lambda x: torch._grouped_mm(x, WEIGHTS, ends), torch.randn(6, 8))


def test_groups_of_flexible_rows() -> None:
    check(multiply_groups, torch.randn(6, 8), flexible=(0,), at=[[torch.randn(2, 8)], [torch.randn(11, 8)]])


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_counts_of_bins(frontend: str) -> None:
    x = torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.5, 1.4, 7.0, -3.0])
    check(lambda x: torch.histc(x, bins=5, min=-1, max=1.5), x, frontend=frontend)
    check(lambda x: torch.histc(x.round(), bins=4, min=-1, max=2), x.reshape(2, 4), frontend=frontend)


def test_bins_between_extremes_are_refused() -> None:
    with pytest.raises(NotConverted, match="counts between the extremes of its input; pass min= and max="):
        check(lambda x: torch.histc(x, bins=4), torch.randn(6))


def test_batches_of_groups_are_refused() -> None:
    with pytest.raises(NotConverted, match="multiplies groups of ranks 3 and 3; give it rows of rank 2"):
        check(lambda x: torch._grouped_mm(x, WEIGHTS), torch.randn(3, 4, 8))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("tokens", [12, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_with_the_experts_of_transformers(tokens: int, frontend: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64, use_cache=False)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.OlmoeForCausalLM(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids).logits

    ids = torch.arange(tokens, dtype=torch.int32)[None]
    program = captured(Logits().to(dtype).eval(), [ids], frontend)
    ane.convert(program, inputs=None if frontend == "export" else input_types([ids]), check=True, skip_model_load=True)
