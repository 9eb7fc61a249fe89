"""The HiFi-GAN vocoder SpeechT5HifiGan. Needs transformers: for tests marked slow, which skip without it.

The class applies weight norm only when asked to, so the weights here are plain, as after remove_weight_norm().
Nothing is changed or worked around: coremltools converts the module as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.lab.models.tools import convert_traced, make_example_input, seed_weights

if TYPE_CHECKING:
    import coremltools as ct
    import torch

SMALL_CONFIG: dict[str, Any] = {
    "model_in_dim": 16,
    "upsample_initial_channel": 32,
    "upsample_rates": [4, 2],
    "upsample_kernel_sizes": [8, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
}
FRAME_COUNT = 24


def make_torch_model(*, full: bool = False, bias: float = 0.1, seed: int = 0) -> tuple[torch.nn.Module, torch.Tensor]:
    """`full` is the published configuration; the input is (1, frames, mel bands)."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    config = SpeechT5HifiGanConfig(**({} if full else SMALL_CONFIG))
    model = seed_weights(SpeechT5HifiGan(config), seed, bias)
    return model, make_example_input((1, FRAME_COUNT, config.model_in_dim), seed)


def convert_model(
    pass_pipeline: ct.PassPipeline | None = None,
    *,
    full: bool = False,
    flexible: bool = False,
    bias: float = 0.1,
    **kwargs: Any,
) -> ct.models.MLModel:
    """`flexible` makes the number of frames a range of 8 to 64."""
    model, example = make_torch_model(full=full, bias=bias)
    bounds = {1: (8, 64)} if flexible else None
    return convert_traced(model, example, flexible=bounds, pass_pipeline=pass_pipeline, **kwargs)
