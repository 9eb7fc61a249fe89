"""Decoders of `transformers` with tiny configurations and random weights, and their conversions with a cache.

Forms of a conversion:

- "states": the cache is two states (layers, 1, heads, context, width); the mask (1, 1, T, E) carries the position in
  its length: rows go to [E - T, E). This is Apple's recipe for Llama 3.1.
- "stateless": the cache of the past goes in with a flexible length, and comes out with the new rows appended.

`convert(name, form)` converts once per machine and version of the libraries, and returns the path of the package.
This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
import transformers as package
from torch import nn

import mil_ane_passes as ane
from tests.lab.models.fired import silence_warnings
from tests.torch_frontend.models.language import seeded, transformers

VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH = 96, 64, 2, 4, 32
FORMS = ("states", "stateless")
_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": HEADS * WIDTH,
           "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 96}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Decoder:
    """A decoder: its class, the class of its configuration, the number of heads in its cache, and the configuration."""

    model: str
    config: str
    heads: int
    settings: dict[str, Any]

    def make(self) -> nn.Module:
        """Return the module with random weights, in float32, ready for inference."""
        transformers()
        torch.manual_seed(0)
        config = getattr(package, self.config)(**self.settings, attn_implementation="eager")
        return seeded(getattr(package, self.model)(config))


DECODERS = {
    "llama": Decoder("LlamaForCausalLM", "LlamaConfig", 2, _GROUPED),
    "qwen2": Decoder("Qwen2ForCausalLM", "Qwen2Config", 2, _GROUPED),
    "qwen3": Decoder("Qwen3ForCausalLM", "Qwen3Config", 2, {**_GROUPED, "head_dim": WIDTH}),
    "gemma": Decoder("GemmaForCausalLM", "GemmaConfig", 2, {**_GROUPED, "head_dim": WIDTH}),
    "mistral": Decoder("MistralForCausalLM", "MistralConfig", 2, {**_GROUPED, "sliding_window": None}),
    "phi3": Decoder("Phi3ForCausalLM", "Phi3Config", 2, {**_GROUPED, "pad_token_id": 0}),
    "gpt2": Decoder("GPT2LMHeadModel", "GPT2Config", HEADS, {
        "vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": HEADS * WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "gpt_neox": Decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", HEADS, _COMMON),
    "falcon": Decoder("FalconForCausalLM", "FalconConfig", 1, {
        "vocab_size": VOCABULARY, "hidden_size": HEADS * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "multi_query": True, "alibi": False, "new_decoder_architecture": False}),
}


class _StateCache(package.cache_utils.Cache):
    """The cache of Apple's recipe: new rows are assigned to a slice at the position, all rows up to it are read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(layers=[])
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.past = 0

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        end = self.past + key_states.shape[2]
        self.k[layer_idx, :, :, self.past:end, :] = key_states
        self.v[layer_idx, :, :, self.past:end, :] = value_states
        return self.k[layer_idx, :, :, :end, :], self.v[layer_idx, :, :, :end, :]

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.past


class _ConcatCache(package.cache_utils.Cache):
    """A cache that appends new rows to those that it was made of."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.k, self.v = k, v
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        made = (torch.cat([self.k[layer_idx], key_states], 2), torch.cat([self.v[layer_idx], value_states], 2))
        self.made.append(made)
        return made

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.k.shape[3]


class StatefulDecoder(nn.Module):
    """(ids, mask) -> logits, with the cache in buffers."""

    def __init__(self, model: nn.Module, heads: int) -> None:
        super().__init__()
        self.model = model
        self.cache = _StateCache((LAYERS, 1, heads, CONTEXT, WIDTH))
        self.register_buffer("keyCache", self.cache.k)
        self.register_buffer("valueCache", self.cache.v)

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, causal_mask: torch.Tensor) -> torch.Tensor:
        self.cache.past = causal_mask.shape[-1] - input_ids.shape[-1]
        found: torch.Tensor = self.model(input_ids, attention_mask=causal_mask, past_key_values=self.cache,
                                         use_cache=True).logits
        return found


class StatelessDecoder(nn.Module):
    """(ids, mask, keys, values) -> logits, keys, values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, causal_mask: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        cache = _ConcatCache(k, v)
        logits = self.model(input_ids, attention_mask=causal_mask, past_key_values=cache, use_cache=True).logits
        return logits, torch.stack([k for k, _ in cache.made]), torch.stack([v for _, v in cache.made])


def make_mask(steps: int, end: int) -> np.ndarray[Any, Any]:
    """Return a causal mask for `steps` new positions of `end`, with a large negative finite value."""
    rows = np.arange(end - steps, end)[:, None]
    return np.where(np.arange(end)[None] <= rows, 0.0, -40000.0).astype(np.float16)[None, None]


def _convert_states(decoder: Decoder, path: Path) -> None:
    module = StatefulDecoder(decoder.make(), decoder.heads).eval()
    example = (torch.zeros((1, 2), dtype=torch.int32), torch.zeros((1, 1, 2, 5)))
    traced = torch.jit.trace(module, example, check_trace=False)
    steps, end = (ct.RangeDim(lower_bound=1, upper_bound=CONTEXT, default=1) for _ in range(2))
    shape = (LAYERS, 1, decoder.heads, CONTEXT, WIDTH)
    ane.convert(
        traced, skip_model_load=True, minimum_deployment_target=ct.target.iOS18,
        inputs=[ct.TensorType("inputIds", (1, steps), dtype=np.int32),
                ct.TensorType("causalMask", (1, 1, steps, end), dtype=np.float16)],
        outputs=[ct.TensorType("logits", dtype=np.float16)],
        states=[ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name)
                for name in ("keyCache", "valueCache")]).save(str(path))


def _convert_stateless(decoder: Decoder, path: Path) -> None:
    module = StatelessDecoder(decoder.make()).eval()
    cache = torch.zeros((LAYERS, 1, decoder.heads, 3, WIDTH))
    example = (torch.zeros((1, 2), dtype=torch.int32), torch.zeros((1, 1, 2, 5)), cache, cache)
    traced = torch.jit.trace(module, example, check_trace=False)
    steps, end = (ct.RangeDim(lower_bound=1, upper_bound=CONTEXT, default=1) for _ in range(2))
    past = ct.RangeDim(lower_bound=1, upper_bound=CONTEXT - 1, default=1)
    shape = (LAYERS, 1, decoder.heads, past, WIDTH)
    ane.convert(
        traced, skip_model_load=True, minimum_deployment_target=ct.target.iOS18,
        inputs=[ct.TensorType("inputIds", (1, steps), dtype=np.int32),
                ct.TensorType("causalMask", (1, 1, steps, end), dtype=np.float16),
                ct.TensorType("keys", shape, dtype=np.float16), ct.TensorType("values", shape, dtype=np.float16)],
        outputs=[ct.TensorType(name, dtype=np.float16) for name in ("logits", "newKeys", "newValues")]).save(str(path))


_CONVERSIONS: dict[str, Callable[[Decoder, Path], None]] = {
    "states": _convert_states, "stateless": _convert_stateless}


def convert(name: str, form: str) -> Path:
    """Return the package of a decoder in a form; it is converted if this machine has not done so before."""
    versions = (torch.__version__, package.__version__, ct.__version__, Path(__file__).read_text())
    key = hashlib.sha256(repr(versions).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / "language_models" / key / f"{name}_{form}.mlpackage"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, silence_warnings():
            made = Path(folder) / path.name
            _CONVERSIONS[form](DECODERS[name], made)
            made.rename(path)
    return path
