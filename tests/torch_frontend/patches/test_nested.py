"""A transformer encoder with a padding mask: refused on the path of nested tensors, right on the slow one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from mil_ane_passes import torch_frontend  # noqa: E402
from tests.torch_frontend.checks import check, convert  # noqa: E402

X, PADDED = torch.randn(2, 5, 8), torch.tensor([[0.0] * 5, [0, 0, 0, 1, 1]])


class Padded(torch.nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, **options)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padded > 0.5)


def test_the_fast_path_is_refused_with_the_way_out():
    with torch.no_grad(), pytest.raises(torch_frontend.NotConverted, match=r"nested tensor.*set_fastpath_enabled"):
        convert(Padded().eval(), (X, PADDED))


def test_the_slow_path_converts():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            check(Padded().eval(), X, PADDED)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_without_nested_tensors_it_converts():
    with torch.no_grad():
        check(Padded(enable_nested_tensor=False).eval(), X, PADDED, rtol=1e-3, atol=1e-4)
