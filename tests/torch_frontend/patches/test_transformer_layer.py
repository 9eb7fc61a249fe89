"""The fast path of `nn.TransformerEncoderLayer`."""

from __future__ import annotations

import pytest
import torch

from ..checks import captured, check

X = torch.randn(2, 5, 8)
CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
PADDED = torch.tensor([[False, False, False, True, True], [True, False, False, False, False]])


@pytest.mark.parametrize("masks", [{}, {"src_mask": CAUSAL}, {"src_key_padding_mask": PADDED},
                                   {"src_mask": CAUSAL, "src_key_padding_mask": PADDED[:1].expand(2, 5)}],
                         ids=["none", "causal", "padding", "both"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_layer(masks: dict[str, torch.Tensor], norm_first: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first,
                                             activation="gelu" if norm_first else "relu")
    layer.eval().requires_grad_(False)
    with torch.no_grad():
        kinds = {node.kind() for node in captured(lambda x: layer(x, **masks), [X], "trace").inlined_graph.nodes()}
        assert "aten::_transformer_encoder_layer_fwd" in kinds
        check(lambda x: layer(x, **masks), X)


def test_flexible_positions() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    with torch.no_grad():
        check(lambda x: layer(x), X, flexible=[0, 1], at=[(torch.randn(3, 9, 8),)])


@pytest.mark.parametrize("masks", [{}, {"attn_mask": CAUSAL}, {"key_padding_mask": PADDED},
                                   {"attn_mask": CAUSAL, "key_padding_mask": PADDED[:1].expand(2, 5)}],
                         ids=["none", "causal", "padding", "both"])
@pytest.mark.parametrize("average", [False, True])
def test_attention(masks: dict[str, torch.Tensor], average: bool) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)

    def attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(x, x, x, average_attn_weights=average, **masks)

    with torch.no_grad():
        kinds = {node.kind() for node in captured(attend, [X], "trace").inlined_graph.nodes()}
        assert "aten::_native_multi_head_attention" in kinds
        check(attend, X)


@pytest.mark.parametrize("size", [1e2, 1e6, 1e15])
@pytest.mark.parametrize("masks", [{"attn_mask": CAUSAL}, {"key_padding_mask": PADDED},
                                   {"attn_mask": CAUSAL, "key_padding_mask": PADDED[:1].expand(2, 5)}],
                         ids=["causal", "padding", "both"])
def test_masked_keys_do_not_count_beside_large_scores(masks: dict[str, torch.Tensor], size: float) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3)) * size
    with torch.no_grad():
        check(lambda x: attention(x, x, x, **masks)[1], x)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_attention_without_weights(frontend: str) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)
    with torch.no_grad():
        check(lambda x: attention(x, x, x, need_weights=False)[0], X, frontend=frontend)


def test_attention_to_another_sequence() -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)

    def attend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen, _ = torch._native_multi_head_attention(
            x, y, y, 8, 2, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight,
            attention.out_proj.bias)
        return seen

    with torch.no_grad():
        check(attend, X, X + 1)
