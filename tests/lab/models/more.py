"""More real architectures, for tests.lab.models.fired: what users convert, in the spellings in which they convert it.

Attention masks are inputs of ones and zeros here, or are left to the model, where tests.lab.models.zoo hands finished
ones to it: that the models' own masks hold the smallest float32 is the point.
This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.lab.models.zoo import (
    ARCHITECTURES,
    IDS_INPUT,
    SMALL_CONFIG,
    TEXT_CONFIG,
    TOKENS,
    VOCABULARY,
    Architecture,
    ModuleCall,
    make_from_torchvision,
    make_from_transformers,
    make_image_input,
    pick_all,
)

_WITH_MASK: dict[str, Any] = {"inputs": ((1, TOKENS), (1, TOKENS)), "ids": VOCABULARY, "masks": (1,)}
_NAMES = ("input_ids", "attention_mask")
_ENCODER_CALL = {"names": _NAMES}
_DECODER_CALL = {"names": _NAMES, "use_cache": False}
_IDS_ONLY_CALL = {"names": ("input_ids",), "use_cache": False}
_SAM_NAMES = ("image_embeddings", "image_positional_embeddings", "sparse_prompt_embeddings", "dense_prompt_embeddings")
_GROUPED_HEADS = {"num_key_value_heads": 2, "head_dim": 48}


def _pick_log_softmax(output: Any) -> torch.Tensor:
    return torch.log_softmax(output[0], dim=-1)


def _pick_log_of_softmax(output: Any) -> torch.Tensor:
    return torch.log(torch.softmax(output[0], dim=-1))


def _pick_sentence_embedding(output: Any) -> torch.Tensor:
    return nn.functional.normalize(output[0].mean(1), dim=-1)


def _pick_energy(output: Any) -> torch.Tensor:
    return torch.logsumexp(output, dim=-1)


def _make_darknet() -> nn.Module:
    import timm

    return timm.create_model("cspdarknet53", pretrained=False, act_layer="mish", num_classes=10)


class ClassicMaskBert(nn.Module):
    """BERT's mask as it was spelled for years: one minus the mask, times the smallest number there is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        extended = (1.0 - mask[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        hidden: torch.Tensor = self.module(ids, attention_mask=extended)[0]
        return hidden


def _make_classic_mask_bert() -> ClassicMaskBert:
    made = make_from_transformers("BertModel", "BertConfig", **TEXT_CONFIG)()
    return ClassicMaskBert(made.module)


class Translator(nn.Module):
    """PyTorch's own transformer, with the causal mask of infinities that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 96), nn.Embedding(VOCABULARY, 96)
        self.inner = nn.Transformer(96, 4, 2, 2, 192, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16))
        self.head = nn.Linear(96, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.source(source), self.target(target), tgt_mask=self.mask)
        return torch.log_softmax(self.head(hidden), dim=-1)


class Attention(nn.Module):
    """Causal attention by hand, as small GPTs are taught: scores of what lies ahead are filled with -inf."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.joint, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("causal", torch.tril(torch.ones(TOKENS, TOKENS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (each.view(batch, length, self.heads, -1).transpose(1, 2)
                             for each in self.joint(x).split(width, dim=2))
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(self.causal[:length, :length] == 0, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width)
        made: torch.Tensor = x + self.out(mixed)
        return made


def _make_small_gpt() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 96), Attention(96, 4), nn.LayerNorm(96), Attention(96, 4), nn.LayerNorm(96),
        nn.Linear(96, VOCABULARY))


def _make_unet() -> nn.Module:
    from tests.lab.models import unet

    return unet.UNet()


def _make_bigvgan() -> ModuleCall:
    from tests.lab.models import bigvgan

    return ModuleCall(bigvgan.make_torch_model()[0], pick=pick_all)


def _make_detr() -> ModuleCall:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"])
    settings = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_attention_heads=4,
        decoder_attention_heads=4, num_queries=20)
    settings._attn_implementation = "eager"
    made = transformers.DetrForObjectDetection(settings)
    return ModuleCall(made, pick=lambda output: (output.logits, output.pred_boxes))


def _make_clip(part: str) -> Callable[[], ModuleCall]:
    def make() -> ModuleCall:
        import transformers

        text = {
            **SMALL_CONFIG,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": TOKENS,
            "eos_token_id": VOCABULARY - 1,
        }
        settings = transformers.CLIPConfig(
            text_config=text, vision_config={**SMALL_CONFIG, "image_size": 96, "patch_size": 16}, projection_dim=64)
        settings._attn_implementation = "eager"
        for each in (settings.text_config, settings.vision_config):
            each._attn_implementation = "eager"
        made = transformers.CLIPModel(settings)
        return ModuleCall(made.get_submodule(part), **({"names": _NAMES} if part == "text_model" else {}))

    return make


_FURTHER_ARCHITECTURES = (
    Architecture("SqueezeNet", "vision", "torchvision", make_from_torchvision("squeezenet1_1"), **make_image_input(64)),
    Architecture("RegNetY", "vision", "torchvision", make_from_torchvision("regnet_y_400mf"), **make_image_input(64)),
    Architecture(
        "ShuffleNetV2", "vision", "torchvision", make_from_torchvision("shufflenet_v2_x0_5"), **make_image_input(64)
    ),
    Architecture(
        "LR-ASPP",
        "vision",
        "torchvision",
        make_from_torchvision("lraspp_mobilenet_v3_large", lambda output: output["out"], weights_backbone=None),
        **make_image_input(96),
    ),
    Architecture("CSPDarknet (mish)", "vision", "timm", _make_darknet, **make_image_input(64)),
    Architecture(
        "ResNet-18, energy score",
        "vision",
        "torchvision",
        make_from_torchvision("resnet18", _pick_energy, num_classes=10),
        **make_image_input(64),
    ),
    Architecture("DETR", "vision", "transformers", _make_detr, **make_image_input(96)),
    Architecture(
        "DPT (depth)",
        "vision",
        "transformers",
        make_from_transformers(
            "DPTForDepthEstimation",
            "DPTConfig",
            hidden_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=192,
            image_size=64,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[16, 32, 48, 64],
            fusion_hidden_size=32,
        ),
        **make_image_input(64),
    ),
    Architecture(
        "SAM, vision encoder",
        "vision",
        "transformers",
        make_from_transformers(
            "SamVisionModel",
            "SamVisionConfig",
            hidden_size=96,
            output_channels=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=128,
            window_size=4,
            global_attn_indexes=[1],
        ),
        **make_image_input(128),
    ),
    Architecture(
        "SAM, mask decoder",
        "vision",
        "transformers",
        make_from_transformers(
            "SamModel",
            "SamConfig",
            part="mask_decoder",
            mask_decoder_config={
                "hidden_size": 64,
                "mlp_dim": 128,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 64,
            },
            prompt_encoder_config={"hidden_size": 64},
            vision_config={"output_channels": 64, "num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 4},
            call={"names": _SAM_NAMES, "multimask_output": True, "pick": lambda output: output[:2]},
        ),
        ((1, 64, 8, 8), (1, 64, 8, 8), (1, 1, 2, 64), (1, 64, 8, 8)),
    ),
    Architecture("U-Net", "vision", "torch", _make_unet, **make_image_input(64)),
    Architecture(
        "Swin2SR",
        "vision",
        "transformers",
        make_from_transformers(
            "Swin2SRForImageSuperResolution",
            "Swin2SRConfig",
            embed_dim=32,
            depths=[2, 2],
            num_heads=[2, 2],
            image_size=32,
        ),
        **make_image_input(32),
    ),
    Architecture("CLIP, vision", "vision", "transformers", _make_clip("vision_model"), **make_image_input(96)),
    Architecture("CLIP, text", "language", "transformers", _make_clip("text_model"), **_WITH_MASK),
    Architecture(
        "DINOv2",
        "vision",
        "transformers",
        make_from_transformers("Dinov2Model", "Dinov2Config", image_size=70, **SMALL_CONFIG),
        **make_image_input(70),
    ),
    Architecture(
        "Whisper, encoder",
        "audio",
        "transformers",
        make_from_transformers(
            "WhisperModel",
            "WhisperConfig",
            part="encoder",
            d_model=192,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=384,
            max_source_positions=100,
            decoder_layers=1,
            decoder_attention_heads=4,
            vocab_size=VOCABULARY,
            pad_token_id=0,
        ),
        ((1, 80, 200),),
    ),
    Architecture(
        "Wav2Vec2, CTC log probabilities",
        "audio",
        "transformers",
        make_from_transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", call={"pick": _pick_log_softmax}, **SMALL_CONFIG),
        ((1, 8000),),
    ),
    Architecture(
        "HuBERT, log of softmax",
        "audio",
        "transformers",
        make_from_transformers("HubertForCTC", "HubertConfig", call={"pick": _pick_log_of_softmax}, **SMALL_CONFIG),
        ((1, 8000),),
    ),
    Architecture(
        "EnCodec decoder",
        "audio",
        "transformers",
        make_from_transformers(
            "EncodecModel", "EncodecConfig", part="decoder", call={"pick": pick_all}, num_filters=16, hidden_size=64
        ),
        ((1, 64, 12),),
    ),
    Architecture(
        "BigVGAN", "audio", "transformers", _make_bigvgan, ((1, 16, 20),), gains={"resblocks": 0.5, "conv_post": 0.3}
    ),
    Architecture(
        "VITS vocoder",
        "audio",
        "transformers",
        make_from_transformers(
            "VitsModel",
            "VitsConfig",
            part="decoder",
            call={"pick": pick_all},
            upsample_initial_channel=64,
            flow_size=32,
            hidden_size=32,
            num_hidden_layers=1,
        ),
        ((1, 32, 12),),
    ),
    Architecture(
        "BERT, mask as input",
        "language",
        "transformers",
        make_from_transformers("BertModel", "BertConfig", call=_ENCODER_CALL, **TEXT_CONFIG),
        **_WITH_MASK,
    ),
    Architecture(
        "BERT, mask as input, exported",
        "language",
        "transformers",
        make_from_transformers("BertModel", "BertConfig", call=_ENCODER_CALL, **TEXT_CONFIG),
        **_WITH_MASK,
        export=True,
    ),
    Architecture("BERT, classic mask", "language", "transformers", _make_classic_mask_bert, **_WITH_MASK),
    Architecture("torch.nn.Transformer", "language", "torch", Translator, ((1, TOKENS), (1, 16)), ids=VOCABULARY),
    Architecture(
        "DistilBERT, mask as input",
        "language",
        "transformers",
        make_from_transformers(
            "DistilBertModel",
            "DistilBertConfig",
            call=_ENCODER_CALL,
            dim=192,
            n_layers=2,
            n_heads=4,
            hidden_dim=384,
            vocab_size=VOCABULARY,
        ),
        **_WITH_MASK,
    ),
    Architecture(
        "RoBERTa, mask as input",
        "language",
        "transformers",
        make_from_transformers("RobertaModel", "RobertaConfig", call=_ENCODER_CALL, **TEXT_CONFIG),
        **_WITH_MASK,
    ),
    Architecture(
        "MPNet, sentence embedding",
        "language",
        "transformers",
        make_from_transformers(
            "MPNetModel", "MPNetConfig", call={**_ENCODER_CALL, "pick": _pick_sentence_embedding}, **TEXT_CONFIG
        ),
        **_WITH_MASK,
    ),
    Architecture(
        "ELECTRA",
        "language",
        "transformers",
        make_from_transformers("ElectraModel", "ElectraConfig", call=_ENCODER_CALL, embedding_size=64, **TEXT_CONFIG),
        **_WITH_MASK,
    ),
    Architecture(
        "ALBERT",
        "language",
        "transformers",
        make_from_transformers("AlbertModel", "AlbertConfig", call=_ENCODER_CALL, embedding_size=64, **TEXT_CONFIG),
        **_WITH_MASK,
    ),
    Architecture("GPT by hand", "language", "torch", _make_small_gpt, **IDS_INPUT),
    Architecture(
        "GPT-2, mask as input",
        "language",
        "transformers",
        make_from_transformers(
            "GPT2LMHeadModel", "GPT2Config", call=_DECODER_CALL, n_embd=192, n_layer=2, n_head=4, vocab_size=VOCABULARY
        ),
        **_WITH_MASK,
    ),
    Architecture(
        "GPT-2, its own mask",
        "language",
        "transformers",
        make_from_transformers(
            "GPT2LMHeadModel", "GPT2Config", call=_IDS_ONLY_CALL, n_embd=192, n_layer=2, n_head=4, vocab_size=VOCABULARY
        ),
        **IDS_INPUT,
    ),
    Architecture(
        "Llama, mask as input",
        "language",
        "transformers",
        make_from_transformers(
            "LlamaForCausalLM", "LlamaConfig", call=_DECODER_CALL, num_key_value_heads=2, **TEXT_CONFIG
        ),
        **_WITH_MASK,
    ),
    Architecture(
        "Mistral",
        "language",
        "transformers",
        make_from_transformers(
            "MistralForCausalLM", "MistralConfig", call=_IDS_ONLY_CALL, **_GROUPED_HEADS, **TEXT_CONFIG
        ),
        **IDS_INPUT,
    ),
    Architecture(
        "Qwen2",
        "language",
        "transformers",
        make_from_transformers(
            "Qwen2ForCausalLM", "Qwen2Config", call=_IDS_ONLY_CALL, num_key_value_heads=2, **TEXT_CONFIG
        ),
        **IDS_INPUT,
    ),
    Architecture(
        "Qwen3",
        "language",
        "transformers",
        make_from_transformers("Qwen3ForCausalLM", "Qwen3Config", call=_IDS_ONLY_CALL, **_GROUPED_HEADS, **TEXT_CONFIG),
        **IDS_INPUT,
    ),
    Architecture(
        "Qwen3, exported",
        "language",
        "transformers",
        make_from_transformers("Qwen3ForCausalLM", "Qwen3Config", call=_DECODER_CALL, **_GROUPED_HEADS, **TEXT_CONFIG),
        **_WITH_MASK,
        export=True,
    ),
    Architecture(
        "Phi-3",
        "language",
        "transformers",
        make_from_transformers(
            "Phi3ForCausalLM", "Phi3Config", call=_IDS_ONLY_CALL, num_key_value_heads=2, pad_token_id=0, **TEXT_CONFIG
        ),
        **IDS_INPUT,
    ),
    Architecture(
        "Gemma 2",
        "language",
        "transformers",
        make_from_transformers(
            "Gemma2ForCausalLM", "Gemma2Config", call=_IDS_ONLY_CALL, **_GROUPED_HEADS, **TEXT_CONFIG
        ),
        **IDS_INPUT,
    ),
    Architecture(
        "T5 encoder, mask as input",
        "language",
        "transformers",
        make_from_transformers(
            "T5EncoderModel",
            "T5Config",
            call=_ENCODER_CALL,
            d_model=192,
            d_kv=48,
            num_heads=4,
            num_layers=2,
            d_ff=384,
            vocab_size=VOCABULARY,
        ),
        **_WITH_MASK,
        gains={"Attention.q": 48**-0.5},
    ),
    Architecture(
        "Mamba 2",
        "language",
        "transformers",
        make_from_transformers(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            call={"use_cache": False},
            hidden_size=64,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=32,
            n_groups=2,
            state_size=16,
            chunk_size=16,
            vocab_size=VOCABULARY,
        ),
        ((1, 16),),
        ids=VOCABULARY,
    ),
)

ALL_ARCHITECTURES = ARCHITECTURES + _FURTHER_ARCHITECTURES
