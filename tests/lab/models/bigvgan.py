"""The BigVGAN vocoder of Qwen2.5-Omni. Needs transformers: for tests marked slow, which skip without it.

Nothing is changed or worked around: coremltools converts the module as it is. Two things to know of the result:
the snakes' multiplications exist only because alpha and beta are drawn non-zero (exp(0) = 1 is dropped), and each
depthwise conv_transpose has an all-zero bias that coremltools added when it folded `ratio *` into the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.lab.models.tools import convert_traced, make_example_input, seed_weights

if TYPE_CHECKING:
    import coremltools as ct
    import torch

SMALL_CONFIG: dict[str, Any] = {
    "mel_dim": 16,
    "upsample_initial_channel": 32,
    "upsample_rates": [3, 2],
    "upsample_kernel_sizes": [7, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
}
FRAME_COUNT = 20
# Snakes and residual sums amplify: with more, the final clip flattens most of the output.
GAINS = {"resblocks": 0.5, "conv_post": 0.3}


def make_torch_model(*, full: bool = False, bias: float = 0.1, seed: int = 0) -> tuple[torch.nn.Module, torch.Tensor]:
    """`full` is the published configuration; the input is a log-mel spectrogram (1, mel bands, frames).

    `bias=0.0` gives convolutions whose biases are all zero.
    """
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configuration
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    config = configuration.Qwen2_5OmniBigVGANConfig(**({} if full else SMALL_CONFIG))
    model = seed_weights(modeling.Qwen2_5OmniToken2WavBigVGANModel(config), seed, bias, GAINS)
    return model, make_example_input((1, config.mel_dim, FRAME_COUNT), seed, scale=2.0, mean=-4.0)


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
    bounds = {2: (8, 64)} if flexible else None
    return convert_traced(model, example, flexible=bounds, pass_pipeline=pass_pipeline, **kwargs)
