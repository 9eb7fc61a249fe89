"""Real architectures from packages on PyPI, with random weights, for tests.lab.models.architectures to measure.

They are taken as they come. Depth and width are scaled down where the full size is slow; ResNet-50 is whole.
This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.lab.models.tools import seed_weights

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Architecture:
    """One model: where it comes from, how it is made, and what it is fed."""

    name: str
    kind: str  # vision, audio or language
    package: str
    make: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]  # shapes
    ids: int = 0  # inputs of rank 2 hold ids below this; 0: numbers
    masks: tuple[int, ...] = ()  # which inputs are attention masks of int32: ones, and zeros in their last quarter
    export: bool = False  # torch.export instead of torch.jit.trace
    gains: dict[str, float] = field(default_factory=dict)  # as in seed_weights
    coremltools_fault: str = ""  # why coremltools' conversion computes something else than the module
    match_coremltools: Callable[[nn.Module], object] | None = (
        None  # changes the module to compute what coremltools converted
    )

    def missing(self) -> str:
        """Why this machine cannot make it, or an empty string."""
        needed = (self.package, "torchvision") if self.package == "timm" else (self.package,)
        return next((f"needs {name}" for name in needed if importlib.util.find_spec(name) is None), "")

    def draw(self, seed: int, batch: int = 1) -> Tensors:
        """Seeded inputs: standard normal numbers, int32 ids."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(batch, *shape[1:]) for shape in self.inputs]
        return tuple(
            _make_padding_mask(shape) if place in self.masks
            else torch.randint(0, self.ids, shape, generator=generator, dtype=torch.int32)
            if self.ids and len(shape) == 2
            else torch.randn(shape, generator=generator)
            for place, shape in enumerate(shapes))

    def model(self, seed: int = 0) -> nn.Module:
        """The module with weights of a sane size: every layer matters and no activation dies or explodes."""
        torch.manual_seed(seed)
        _complete_torchvision()
        model = seed_weights(self.make(), seed, gains=self.gains)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("weight") and parameter.dim() == 1:  # of a normalisation: around one
                    parameter.add_(1)
                elif name.endswith("alpha"):  # of a snake, which divides by it
                    parameter.abs_().add_(0.5)
        _calibrate_batch_norms(model, self.draw(seed + 1, batch=4))
        return model


def _make_padding_mask(shape: tuple[int, ...]) -> torch.Tensor:
    mask = torch.ones(shape, dtype=torch.int32)
    mask[..., -(shape[-1] // 4):] = 0
    return mask


def _complete_torchvision() -> None:
    """Make torchvision importable beside a torch of another build; timm and transformers import it, too.

    PyPI's wheel is built for CUDA. Beside a torch for CPUs its compiled operators do not load, and importing fails
    where its Python part describes two of them. No model here calls them, so to declare them is enough.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _calibrate_batch_norms(model: nn.Module, batch: Tensors) -> None:
    """Running statistics of a random batch: fresh ones (0 and 1) would leave the values of deep models unbounded."""
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for each in norms:
        each.reset_running_stats()
        each.momentum = None  # the plain mean over batches, of which there is one
        each.train()
    if norms:
        with torch.no_grad():
            model(*batch)
    model.eval()


class ModuleCall(nn.Module):
    """A module as a function of tensors: `pick` chooses outputs, `constants` are further arguments."""

    def __init__(
        self, module: nn.Module, names: Sequence[str] = (), pick: Callable[[Any], Any] = lambda output: output[0],
        **constants: Any,
    ) -> None:
        super().__init__()
        self.module, self.names, self.pick = module, names, pick
        self.settings = {name: value for name, value in constants.items() if not isinstance(value, torch.Tensor)}
        self.tensors = sorted(set(constants) - set(self.settings))
        for name in self.tensors:
            self.register_buffer(name, constants[name].clone())

    def forward(self, *inputs: torch.Tensor) -> Any:
        further = {**self.settings, **{name: getattr(self, name) for name in self.tensors}}
        if self.names:
            return self.pick(self.module(**dict(zip(self.names, inputs)), **further))
        return self.pick(self.module(*inputs, **further))


def pick_all(output: Any) -> Any:
    return output


def make_from_torchvision(name: str, pick: Callable[[Any], Any] = pick_all, **options: Any) -> Callable[[], ModuleCall]:
    def make() -> ModuleCall:
        from torchvision.models import get_model

        return ModuleCall(get_model(name, weights=None, **options), pick=pick)

    return make


def _make_feature_pyramid() -> ModuleCall:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    made = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5)
    return ModuleCall(made, pick=lambda levels: tuple(levels.values()))


def make_from_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return make


def make_from_transformers(
    module: str, config: str, part: str = "", call: dict[str, Any] | None = None, **options: Any
) -> Callable[[], ModuleCall]:
    """`part` is the attribute of the module to take, `call` the arguments of `ModuleCall`, `options` those of the
    config."""

    def make() -> ModuleCall:
        import transformers

        settings = getattr(transformers, config)(**options)
        settings._attn_implementation = "eager"
        made = getattr(transformers, module)(settings)
        return ModuleCall(made.get_submodule(part), **(call or {}))

    return make


def _make_attention_mask(length: int, *, causal: bool) -> torch.Tensor:
    """Added to attention scores (1, 1, length, length). A large number: half precision has no float32 minimum."""
    return torch.full((1, 1, length, length), -1e4).triu(1) if causal else torch.zeros(1, 1, length, length)


def _make_prediction_network() -> ModuleCall:
    from transformers.models.parakeet import configuration_parakeet, modeling_parakeet

    settings = configuration_parakeet.ParakeetTDTConfig(vocab_size=VOCABULARY, decoder_hidden_size=192)
    return ModuleCall(modeling_parakeet.ParakeetRNNTDecoder(settings), pick=pick_all)


def _match_coremltools_reciprocals(model: nn.Module) -> None:
    from transformers.models.dac.modeling_dac import Snake1d

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + (self.alpha * x).sin().pow(2) / (self.alpha + 1e-9 + 1e-4)

    for each in model.modules():
        if isinstance(each, Snake1d):
            each.forward = forward.__get__(each)


def _match_coremltools_gelus(model: nn.Module) -> None:
    for each in model.modules():
        if hasattr(each, "act_fn"):
            each.act_fn = nn.GELU()


VOCABULARY, TOKENS = 2048, 32
SMALL_CONFIG = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384}
TEXT_CONFIG = {**SMALL_CONFIG, "vocab_size": VOCABULARY}
_MASKED_CALL = {"attention_mask": _make_attention_mask(TOKENS, causal=False)}
_CAUSAL_CALL = {"attention_mask": _make_attention_mask(TOKENS, causal=True), "use_cache": False}
IDS_INPUT: dict[str, Any] = {"inputs": ((1, TOKENS),), "ids": VOCABULARY}


def make_image_input(size: int) -> dict[str, Any]:
    return {"inputs": ((1, 3, size, size),)}


ARCHITECTURES = (
    Architecture("ResNet-50", "vision", "torchvision", make_from_torchvision("resnet50"), **make_image_input(224)),
    Architecture(
        "MobileNetV3", "vision", "torchvision", make_from_torchvision("mobilenet_v3_small"), **make_image_input(128)
    ),
    Architecture(
        "EfficientNet-B0", "vision", "torchvision", make_from_torchvision("efficientnet_b0"), **make_image_input(128)
    ),
    Architecture(
        "DeepLabV3",
        "vision",
        "torchvision",
        make_from_torchvision("deeplabv3_mobilenet_v3_large", lambda output: output["out"], weights_backbone=None),
        **make_image_input(96),
    ),
    Architecture("ResNet-18 FPN", "vision", "torchvision", _make_feature_pyramid, ((1, 3, 96, 128),)),
    Architecture("ConvNeXt", "vision", "timm", make_from_timm("convnext_atto"), **make_image_input(96)),
    Architecture(
        "ViT",
        "vision",
        "timm",
        make_from_timm("vit_tiny_patch16_224", img_size=96),
        **make_image_input(96),
        export=True,
    ),
    Architecture(
        "Swin",
        "vision",
        "timm",
        make_from_timm("swin_tiny_patch4_window7_224", img_size=112, embed_dim=48),
        **make_image_input(112),
        export=True,
    ),
    Architecture(
        "Sequencer2D (LSTM)",
        "vision",
        "timm",
        make_from_timm("sequencer2d_s", layers=(1, 1, 2, 1)),
        **make_image_input(56),
    ),
    Architecture(
        "SegFormer",
        "vision",
        "transformers",
        make_from_transformers("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[16, 32, 80, 128]),
        **make_image_input(64),
    ),
    Architecture(
        "Wav2Vec2",
        "audio",
        "transformers",
        make_from_transformers("Wav2Vec2Model", "Wav2Vec2Config", **SMALL_CONFIG),
        ((1, 8000),),
    ),
    Architecture(
        "Whisper",
        "audio",
        "transformers",
        make_from_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            d_model=192,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=384,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=384,
            max_source_positions=100,
            vocab_size=VOCABULARY,
            pad_token_id=0,
            call={
                "names": ("input_features", "decoder_input_ids"),
                "use_cache": False,
                "decoder_attention_mask": _make_attention_mask(16, causal=True),
            },
        ),
        ((1, 80, 200), (1, 16)),
        ids=VOCABULARY,
    ),
    Architecture(
        "AST",
        "audio",
        "transformers",
        make_from_transformers("ASTModel", "ASTConfig", max_length=128, **SMALL_CONFIG),
        ((1, 128, 128),),
    ),
    Architecture(
        "Parakeet conformer",
        "audio",
        "transformers",
        make_from_transformers("ParakeetEncoder", "ParakeetEncoderConfig", **SMALL_CONFIG),
        ((1, 80, 80),),
    ),
    Architecture(
        "HiFi-GAN",
        "audio",
        "transformers",
        make_from_transformers(
            "SpeechT5HifiGan", "SpeechT5HifiGanConfig", call={"pick": pick_all}, upsample_initial_channel=128
        ),
        ((1, 30, 80),),
    ),
    Architecture(
        "DAC decoder",
        "audio",
        "transformers",
        make_from_transformers(
            "DacModel", "DacConfig", part="decoder", call={"pick": pick_all}, hidden_size=128, decoder_hidden_size=192
        ),
        ((1, 128, 10),),
        gains={"": 0.7},
        match_coremltools=_match_coremltools_reciprocals,
        coremltools_fault="torch.reciprocal becomes `inverse` with its default epsilon: 1 / (x + 1e-4)",
    ),
    Architecture(
        "RNN-T predictor (LSTM)",
        "language",
        "transformers",
        _make_prediction_network,
        **IDS_INPUT,
        gains={"embedding": 192**0.5, "lstm": 1.5},
    ),
    Architecture(
        "BERT",
        "language",
        "transformers",
        make_from_transformers("BertModel", "BertConfig", call=_MASKED_CALL, **TEXT_CONFIG),
        **IDS_INPUT,
        export=True,
    ),
    Architecture(
        "DistilBERT",
        "language",
        "transformers",
        make_from_transformers(
            "DistilBertModel", "DistilBertConfig", dim=192, n_layers=3, n_heads=4, hidden_dim=384, vocab_size=VOCABULARY
        ),
        **IDS_INPUT,
    ),
    Architecture(
        "GPT-2",
        "language",
        "transformers",
        make_from_transformers(
            "GPT2LMHeadModel", "GPT2Config", call=_CAUSAL_CALL, n_embd=192, n_layer=3, n_head=4, vocab_size=VOCABULARY
        ),
        **IDS_INPUT,
    ),
    Architecture(
        "T5",
        "language",
        "transformers",
        make_from_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=192,
            d_kv=48,
            num_heads=4,
            num_layers=2,
            d_ff=384,
            vocab_size=VOCABULARY,
            call={
                "names": ("input_ids", "decoder_input_ids"),
                "use_cache": False,
                "decoder_attention_mask": _make_attention_mask(16, causal=True),
            },
        ),
        ((1, TOKENS), (1, 16)),
        ids=VOCABULARY,
        gains={"Attention.q": 48**-0.5},
    ),  # T5 does not divide the scores
    Architecture(
        "Llama",
        "language",
        "transformers",
        make_from_transformers(
            "LlamaForCausalLM", "LlamaConfig", call=_CAUSAL_CALL, num_key_value_heads=2, **TEXT_CONFIG
        ),
        **IDS_INPUT,
        export=True,
    ),
    Architecture(
        "Mamba",
        "language",
        "transformers",
        make_from_transformers(
            "MambaForCausalLM",
            "MambaConfig",
            call={"use_cache": False},
            hidden_size=128,
            num_hidden_layers=2,
            vocab_size=VOCABULARY,
        ),
        ((1, 16),),
        ids=VOCABULARY,
    ),
    Architecture(
        "Gemma",
        "language",
        "transformers",
        make_from_transformers(
            "GemmaForCausalLM", "GemmaConfig", call=_CAUSAL_CALL, num_key_value_heads=1, head_dim=48, **TEXT_CONFIG
        ),
        **IDS_INPUT,
        export=True,
        match_coremltools=_match_coremltools_gelus,
        coremltools_fault="the keyword approximate='tanh' of an exported gelu is dropped: the exact gelu",
    ),
)
