"""Small text models of `transformers`, random weights: each a module of tensors to one tensor, and an example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

VOCABULARY = 50
BATCH, LENGTH = 2, 7
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**ENCODER, "num_key_value_heads": 2, "max_position_embeddings": 32}


@dataclass(frozen=True)
class Model:
    """A module, and tensors it is called with."""

    module: torch.nn.Module
    example: tuple[torch.Tensor, ...]


class First(torch.nn.Module):
    """The first output of a model, called by the names of its arguments; what is not a tensor stays as given."""

    def __init__(self, model: torch.nn.Module, *names: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, fixed

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, tensors, strict=True)), **self.fixed, return_dict=False)[0]


def tokens(length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), dtype=torch.int32)


def padding(*real: int, length: int = LENGTH, left: bool = False) -> torch.Tensor:
    """A mask with that many real tokens a row, the rest padding."""
    places = torch.arange(length).flip(0) if left else torch.arange(length)
    return torch.stack([(places < count).to(torch.int32) for count in real])


def transformers() -> ModuleType:
    """The package; told that torchvision is not there when it is one of another build, which breaks every import."""
    import transformers
    from transformers.utils import import_utils

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        known = import_utils._is_package_available
        import_utils._is_package_available = lambda name, *more, **named: (
            (False, "N/A") if name == "torchvision" else known(name, *more, **named))
        import_utils.is_torchvision_available.cache_clear()
    return transformers


def seeded(module: torch.nn.Module) -> torch.nn.Module:
    """The module with parameters drawn wide enough that every layer shows in the output; ready for inference."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(1.5 * drawn / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.2 * drawn)
    return module.eval()


def _model(class_name: str, config_name: str, *names: str, example: Callable[[], tuple[torch.Tensor, ...]],
           fixed: dict[str, Any] | None = None, **config: Any) -> Model:
    package = transformers()
    torch.manual_seed(0)
    built = getattr(package, class_name)(getattr(package, config_name)(vocab_size=VOCABULARY, **config))
    return Model(seeded(First(built, *names, **(fixed or {}))), example())


def _encoder(class_name: str, config_name: str, **config: Any) -> Model:
    return _model(class_name, config_name, "input_ids", "attention_mask",
                  example=lambda: (tokens(), padding(7, 4)), **config)


def _decoder(class_name: str, config_name: str, **config: Any) -> Model:
    """Padded on the left, as for generation: of the padding, whole rows of attention are masked."""
    return _model(class_name, config_name, "input_ids", "attention_mask", fixed={"use_cache": False},
                  example=lambda: (tokens(), padding(7, 4, left=True)), **config)


def _bart() -> Model:
    return _model("BartModel", "BartConfig", "input_ids", "attention_mask", "decoder_input_ids",
                  fixed={"use_cache": False}, example=lambda: (tokens(), padding(7, 4), tokens(5)),
                  d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                  decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32)


LANGUAGE: dict[str, Callable[[], Model]] = {
    "bert": lambda: _encoder("BertModel", "BertConfig", **ENCODER),
    "distilbert": lambda: _encoder("DistilBertModel", "DistilBertConfig", dim=32, n_layers=2, n_heads=4,
                                   hidden_dim=64),
    "roberta": lambda: _encoder("RobertaModel", "RobertaConfig", **ENCODER),
    "gpt2": lambda: _decoder("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "opt": lambda: _decoder("OPTForCausalLM", "OPTConfig", hidden_size=32, num_hidden_layers=2, ffn_dim=64,
                            num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=32),
    "llama": lambda: _decoder("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "qwen2": lambda: _decoder("Qwen2ForCausalLM", "Qwen2Config", **DECODER),
    "t5-encoder": lambda: _encoder("T5EncoderModel", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2,
                                   num_heads=4),
    "bart": _bart,
}
