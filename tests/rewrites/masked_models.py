"""Small models of `transformers`, and attention by hand, with the masks they are called with, for tests of masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.torch_frontend.models.language import VOCABULARY, seeded, transformers

LENGTH = 8
LOWEST = torch.finfo(torch.float32).min
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class Masked(nn.Module):
    """A text model with a padding mask (1, where a token is, or 0), made additive the way BERT's first code did."""

    def __init__(self, model: nn.Module, causal: bool, **fixed: Any) -> None:
        super().__init__()
        self.model, self.causal, self.fixed = model, causal, fixed

    def forward(self, ids: torch.Tensor, m: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        mask = (1.0 - m[:, None, None, :].to(torch.float32)) * LOWEST
        if self.causal:
            mask = mask + torch.full((LENGTH, LENGTH), LOWEST).triu(1)
        names = dict(zip(("encoder_hidden_states",), more))
        return self.model(input_ids=ids, attention_mask=mask, **names, **self.fixed, return_dict=False)[0]


class Decoding(nn.Module):
    """A T5 decoder or its like under a mask of what is padded."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        mask = (1.0 - m[:, None, None, :].to(torch.float32)) * LOWEST
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=False)[0]


class ByHand(nn.Module):
    """Attention as minGPT and OpenAI's CLIP and Whisper write it: a buffer of zeros and ones, or of zeros and -inf."""

    def __init__(self, additive: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.additive = additive
        self.register_buffer("seen", torch.ones(32, 32).tril()[None, None])
        self.register_buffer("mask", torch.full((32, 32), float("-inf")).triu_(1))

    def forward(self, ids: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).split(32, dim=-1))
        scores = query @ key.transpose(-2, -1) * 8**-0.5
        if self.additive:
            scores = scores + self.mask[:LENGTH, :LENGTH]
        else:
            scores = scores.masked_fill(self.seen[:, :, :LENGTH, :LENGTH] == 0, float("-inf"))
        scores = scores + (1 - m[:, None, None, :].float()) * -1e9
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)) + x


def _text(model: str, config: str, attention: str, causal: bool = False, fixed: dict[str, Any] | None = None,
          wrap: Callable[..., nn.Module] = Masked, **settings: Any) -> nn.Module:
    package = transformers()
    made = getattr(package, config)(vocab_size=VOCABULARY, **settings)
    made._attn_implementation = attention
    inner = getattr(package, model)(made)
    return seeded(wrap(inner, causal, **(fixed or {})) if wrap is Masked else wrap(inner))


def _t5(attention: str) -> nn.Module:
    package = transformers()
    made = package.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=64)
    made._attn_implementation = attention
    return seeded(Decoding(package.T5EncoderModel(made).encoder))


def _whisper(attention: str) -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperDecoder

    package = transformers()
    made = package.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
        max_target_positions=32, pad_token_id=0)
    made._attn_implementation = attention
    return seeded(Masked(WhisperDecoder(made), True, use_cache=False))


_PLAIN = {"use_cache": False}
MODELS: dict[str, Callable[[], nn.Module]] = {
    f"{name}, {attention}": lambda make=make, attention=attention: make(attention)
    for attention in ("eager", "sdpa") for name, make in {
        "BERT": lambda how: _text("BertModel", "BertConfig", how, **_ENCODER),
        "RoBERTa": lambda how: _text("RobertaModel", "RobertaConfig", how, **_ENCODER),
        "DistilBERT": lambda how: _text("DistilBertModel", "DistilBertConfig", how, dim=32, n_layers=2, n_heads=4,
                                        hidden_dim=64),
        "GPT-2": lambda how: _text("GPT2Model", "GPT2Config", how, True, _PLAIN, n_embd=32, n_layer=2, n_head=4,
                                   n_positions=32),
        "Llama": lambda how: _text("LlamaModel", "LlamaConfig", how, True, _PLAIN, num_key_value_heads=2, **_ENCODER),
        "T5": _t5,
        "Whisper": _whisper,
    }.items()}
MODELS |= {
    "minGPT": lambda: seeded(ByHand(additive=False)),
    "OpenAI": lambda: seeded(ByHand(additive=True)),
}


def model(name: str) -> nn.Module:
    """The model, the same whenever it is made."""
    torch.manual_seed(0)
    return MODELS[name]()


def example(name: str) -> tuple[torch.Tensor, ...]:
    """Two sequences, the second with three tokens of padding at its end; what a decoder attends to besides."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), dtype=torch.int32, generator=generator)
    m = torch.ones(2, LENGTH, dtype=torch.int32)
    m[1, 5:] = 0
    more = (torch.randn(2, 10, 32, generator=generator),) if name.startswith("Whisper") else ()
    return ids, m, *more
