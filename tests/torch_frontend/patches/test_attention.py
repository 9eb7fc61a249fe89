"""scaled_dot_product_attention: masks of every kind, grouped heads, causal, scaled."""

from __future__ import annotations

import coremltools as ct
import pytest

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from mil_ane_passes import torch_frontend  # noqa: E402
from tests.torch_frontend.checks import check, convert, outputs  # noqa: E402

TARGETS = (ct.target.iOS16, ct.target.iOS18)
torch.manual_seed(0)
Q, K, V = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)
MASK = (torch.rand(2, 1, 3, 5) > 0.5).float()
MASK[1, 0, 1] = 0


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_masked_as_a_whole_are_zero(frontend, target):
    def model(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, q, q, mask > 0.5)

    mask = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]])
    check(model, Q, mask, frontend=frontend, target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_float_mask_of_minus_infinity(target):
    def model(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, q, q, mask)

    check(model, Q, torch.where(MASK[..., :3] > 0.5, 0.0, -torch.inf), target=target)


def test_a_constant_mask_with_an_empty_row():
    mask = torch.tensor([[True, False, False], [False, False, False], [False, True, True]])
    check(lambda q: scaled_dot_product_attention(q, q, q, mask), Q)


@pytest.mark.parametrize("target", TARGETS)
def test_a_mask_of_the_whole_batch_in_half_precision_is_finite(target):
    def model(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, k, mask > 0.5)

    mlmodel = convert(model, (Q, K, MASK), target=target, precision=ct.precision.FLOAT16)
    (found,) = outputs(mlmodel, (Q, K, MASK), "float16")
    torch.testing.assert_close(torch.from_numpy(found).float(), model(Q, K, MASK), rtol=1e-2, atol=1e-2)
    assert (found[1, :, 1] == 0).all()


def _by_a_computed_mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, k, attn_mask=k[..., :5] > 0)


def _by_a_computed_mask_and_scale(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, k, attn_mask=k[..., :5] > 0, scale=1.0)


def _causal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, k, is_causal=True)


def _by_a_constant(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, k, attn_mask=torch.ones(5, 5).tril() > 0)


def _by_a_constant_and_scale(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, k, attn_mask=torch.ones(5, 5).tril() > 0, scale=1.0)


def _by_a_constant_with_an_empty_row(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, k, attn_mask=torch.ones(5, 5).tril(-1) > 0)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("size", [1e2, 1e6, 1e16])
@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", [_by_a_computed_mask, _by_a_computed_mask_and_scale, _causal, _by_a_constant,
                                   _by_a_constant_and_scale, _by_a_constant_with_an_empty_row])
def test_masked_keys_do_not_count_beside_large_scores(model, target, frontend, size):
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 2, 4, 5, 8, generator=generator) * size
    check(model, q, k, frontend=frontend, target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", [_by_a_computed_mask, _causal, _by_a_constant, _by_a_constant_with_an_empty_row])
def test_masked_keys_do_not_count_in_half_precision(model, target):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 2, 4, 5, 16, generator=generator) * 8).round()  # whose scores are numbers of fp16
    k[..., 1, :5] = -abs(k[..., 1, :5])  # hides a whole row
    mlmodel = convert(model, (q, k), target=target, precision=ct.precision.FLOAT16)
    (found,) = outputs(mlmodel, (q, k), "float16")
    torch.testing.assert_close(torch.from_numpy(found).float(), model(q, k), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("target", TARGETS)
def test_grouped_heads(frontend, target):
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.5)

    check(model, Q, K[:, :2], V[:, :2], frontend=frontend, target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_causal_of_a_flexible_length(target):
    check(lambda q: scaled_dot_product_attention(q, q, q, is_causal=True), Q, flexible=(2,), target=target,
          at=[(torch.randn(2, 4, 7, 8),), (torch.randn(2, 4, 7, 8) * 1e3,)])


def test_dropout_is_refused():
    with pytest.raises(torch_frontend.NotConverted, match=r"applies random dropout; pass dropout_p=0\.0"):
        convert(lambda q: scaled_dot_product_attention(q, q, q, dropout_p=0.1), (Q,))
