"""Small vocoders of the HiFi-GAN and BigVGAN kind, in plain torch: the shapes of the real ones without transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.lab.models.tools import convert_traced, make_example_input, seed_weights

if TYPE_CHECKING:
    import coremltools as ct
    import torch

MEL_BANDS = 16


def make_torch_model(
    kind: str = "hifigan",
    *,
    channels: int = 32,
    rates: tuple[int, ...] = (3, 2),
    kernels: tuple[int, ...] = (3, 5),
    dilations: tuple[int, ...] = (1, 3),
    frames: int = 20,
    bias: float = 0.1,
    seed: int = 0,
) -> tuple[torch.nn.Module, torch.Tensor]:
    """`kind` is "hifigan" (leaky_relu) or "bigvgan" (anti-aliased snakes); `rates` has one entry per stage."""
    from tests.lab.models import vocoder_modules as modules

    # Snakes and residual sums amplify: with more gain the final tanh flattens most of the output.
    gains = {"blocks": 0.5, "conv_post": 0.3} if kind == "bigvgan" else {}
    activation = {"hifigan": modules.LeakyRelu, "bigvgan": modules.AntiAliasedSnake}[kind]
    if channels % 2 ** len(rates):
        raise ValueError(f"channels ({channels}) are halved at each of {len(rates)} stages")
    generator = modules.Generator(activation, MEL_BANDS, channels, rates, kernels, dilations)
    return seed_weights(generator, seed, bias, gains), make_example_input((1, MEL_BANDS, frames), seed)


def convert_model(
    pass_pipeline: ct.PassPipeline | None = None,
    *,
    kind: str = "hifigan",
    flexible: bool = False,
    model: dict[str, Any] | None = None,
    **kwargs: Any,
) -> ct.models.MLModel:
    """`model` are torch_model's options; `flexible` makes the number of frames a range of 8 to 64."""
    module, example = make_torch_model(kind, **(model or {}))
    bounds = {2: (8, 64)} if flexible else None
    return convert_traced(module, example, flexible=bounds, pass_pipeline=pass_pipeline, **kwargs)
