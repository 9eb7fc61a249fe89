"""The smallest model whose numbers were reported wrong on the ANE: one 1-D transposed convolution with a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.lab.models.tools import convert_traced

if TYPE_CHECKING:
    import coremltools as ct
    import torch


def make_torch_model() -> tuple[torch.nn.Module, torch.Tensor]:
    """The layer with PyTorch's own seeded initialisation, and its example input."""
    import torch

    torch.manual_seed(42)
    model = torch.nn.ConvTranspose1d(768, 384, kernel_size=7, stride=3, padding=2).eval()
    return model, torch.randn(1, 768, 600)


def convert_model(pass_pipeline: ct.PassPipeline | None = None, **kwargs: Any) -> ct.models.MLModel:
    return convert_traced(*make_torch_model(), pass_pipeline=pass_pipeline, **kwargs)
