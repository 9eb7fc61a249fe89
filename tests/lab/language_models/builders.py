"""Models of `transformers` with tiny configurations and random weights: encoders, and decoders with a cache.

Encoders are converted with a flexible number of tokens (form "encoder"). Forms of a decoder's conversion:

- "states": the cache is two states (layers, 1, heads, context, width); the mask (1, 1, T, E) carries the position in
  its length: rows go to [E - T, E). This is Apple's recipe for Llama 3.1.
- "stateless": the cache of the past goes in with a flexible length, and comes out with the new rows appended.
- "cross": an encoder's output goes in besides, of fixed length, and a mask of its keys where `masked`; the cache of the
  decoder's own keys is as in "states". "cross, flexible": of flexible length.
- "recurrent": the states of each layer are replaced at each step, of one token.
- "states, exported" and "stateless, exported": the same by `torch.export`; the others are traced.

`convert(name, form)` converts once per machine and version of the libraries, and returns the path of the package.
This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coremltools as ct
import numpy as np
import torch
import transformers as package
from torch import nn

import mil_ane_passes as ane
from mil_ane_passes import torch_frontend
from tests.lab.models.fired import silence_warnings
from tests.torch_frontend.models.language import seeded, transformers

VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH = 96, 64, 2, 4, 32
EXPORTED = ", exported"
FORMS = ("states", "stateless", f"states{EXPORTED}", f"stateless{EXPORTED}")
_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": HEADS * WIDTH,
           "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 96}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Decoder:
    """A decoder: its class, the class of its configuration, the number of heads in its cache, and the configuration.

    With `positions`, the module is given the places of new tokens; with `window`, some layers see this number of tokens
    alone, by a mask that is made of the other one; `prepare` changes the module, such as what reads masks of rank 2.
    """

    model: str
    config: str
    heads: int
    settings: dict[str, Any]
    layers: int = LAYERS
    width: int = WIDTH
    positions: bool = False
    window: int | None = None
    prepare: Callable[[nn.Module], None] | None = None

    def get_cache_shape(self, rows: Any = CONTEXT) -> tuple[Any, ...]:
        return (self.layers, 1, self.heads, rows, self.width)

    def make(self) -> nn.Module:
        """Return the module with random weights, in float32, ready for inference."""
        transformers()
        torch.manual_seed(0)
        config = getattr(package, self.config)(**self.settings, attn_implementation="eager")
        made = seeded(getattr(package, self.model)(config))
        if getattr(self, "prepare", None) is not None:
            self.prepare(made)
        return made


def _spread_alibi(model: nn.Module) -> None:
    """Let BLOOM bias scores by the places of keys, whatever the mask says: it expects one of rank 2."""
    def build(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
        slopes = package.models.bloom.modeling_bloom._get_alibi_slopes(heads, mask.device)
        found: torch.Tensor = (slopes[:, None, None] * torch.arange(mask.shape[-1])).to(dtype)
        return found

    model.transformer.build_alibi_tensor = build


_SPARSE = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": HEADS * WIDTH, "n_layer": LAYERS,
           "n_head": HEADS, "rotary_dim": WIDTH // 2, "bos_token_id": 0, "eos_token_id": 1}
DECODERS = {
    "llama": Decoder("LlamaForCausalLM", "LlamaConfig", 2, _GROUPED),
    "qwen2": Decoder("Qwen2ForCausalLM", "Qwen2Config", 2, _GROUPED),
    "qwen3": Decoder("Qwen3ForCausalLM", "Qwen3Config", 2, {**_GROUPED, "head_dim": WIDTH}),
    "gemma": Decoder("GemmaForCausalLM", "GemmaConfig", 2, {**_GROUPED, "head_dim": WIDTH}),
    "gemma2": Decoder("Gemma2ForCausalLM", "Gemma2Config", 2, {
        **_GROUPED, "head_dim": WIDTH, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": WIDTH, "sliding_window": 8}, window=8),
    "gemma3": Decoder("Gemma3ForCausalLM", "Gemma3TextConfig", 2, {
        **_GROUPED, "head_dim": WIDTH, "query_pre_attn_scalar": WIDTH, "sliding_window": 8, "layer_types": [
            "sliding_attention", "full_attention"]}, window=8),
    "mistral": Decoder("MistralForCausalLM", "MistralConfig", 2, {**_GROUPED, "sliding_window": None}),
    "phi3": Decoder("Phi3ForCausalLM", "Phi3Config", 2, {**_GROUPED, "pad_token_id": 0}),
    "gpt2": Decoder("GPT2LMHeadModel", "GPT2Config", HEADS, {
        "vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": HEADS * WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "gpt_neox": Decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", HEADS, _COMMON),
    "llama_20m": Decoder("LlamaForCausalLM", "LlamaConfig", 8, {
        "vocab_size": 8192, "max_position_embeddings": CONTEXT, "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1376}, 4, 64),
    "falcon": Decoder("FalconForCausalLM", "FalconConfig", 1, {
        "vocab_size": VOCABULARY, "hidden_size": HEADS * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "multi_query": True, "alibi": False, "new_decoder_architecture": False}),
}
MORE_DECODERS = {
    "opt": Decoder("OPTForCausalLM", "OPTConfig", HEADS, {
        **{key: value for key, value in _COMMON.items() if key != "intermediate_size"}, "ffn_dim": 96,
        "word_embed_proj_dim": HEADS * WIDTH}, positions=True),
    "bloom": Decoder("BloomForCausalLM", "BloomConfig", HEADS, {
        "vocab_size": VOCABULARY, "hidden_size": HEADS * WIDTH, "n_layer": LAYERS, "n_head": HEADS},
        prepare=_spread_alibi),
    "stablelm": Decoder("StableLmForCausalLM", "StableLmConfig", 2, {
        **_GROUPED, "use_qkv_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
    "olmo": Decoder("OlmoForCausalLM", "OlmoConfig", 2, {**_GROUPED, "clip_qkv": 8.0}),
    "cohere": Decoder("CohereForCausalLM", "CohereConfig", 2, {**_GROUPED, "use_qk_norm": True}),
    "granite": Decoder("GraniteForCausalLM", "GraniteConfig", 2, {
        **_GROUPED, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625}),
    "gptj": Decoder("GPTJForCausalLM", "GPTJConfig", HEADS, _SPARSE),
    "codegen": Decoder("CodeGenForCausalLM", "CodeGenConfig", HEADS, {**_SPARSE, "n_ctx": CONTEXT}),
}
"Decoders that are converted in the form \"states\" alone: other positions, norms and scales."


ENCODED = 20
"The tokens of an encoder that a decoder attends to."


@dataclass(frozen=True)
class CrossDecoder:
    """A decoder with cross attention: its class, the class of its configuration, and the configuration."""

    model: str
    config: str
    settings: dict[str, Any]
    masked: bool = False
    "Whether the mask of the encoder's keys is an input."

    def make(self) -> nn.Module:
        """Return the module with random weights, in float32, ready for inference."""
        module = Decoder.make(self)  # type: ignore[arg-type]
        for name, weight in module.named_parameters():
            if self.config == "T5Config" and name.endswith("Attention.q.weight"):
                weight.data *= self.settings["d_kv"] ** -0.5  # T5 has the scale of its scores in these weights
        return module


_CROSS = {"vocab_size": VOCABULARY, "d_model": HEADS * WIDTH, "pad_token_id": 0, "decoder_start_token_id": 1,
          "encoder_layers": 1, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
          "decoder_attention_heads": HEADS, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
CROSS_DECODERS = {
    "t5_decoder": CrossDecoder("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCABULARY, "d_model": HEADS * WIDTH, "d_kv": WIDTH, "d_ff": 96, "num_layers": 1,
        "num_decoder_layers": LAYERS, "num_heads": HEADS, "decoder_start_token_id": 0}, True),
    "bart_decoder": CrossDecoder("BartForConditionalGeneration", "BartConfig", {
        **_CROSS, "max_position_embeddings": CONTEXT, "forced_eos_token_id": None}, True),
    "whisper_decoder": CrossDecoder("WhisperForConditionalGeneration", "WhisperConfig", {
        **_CROSS, "max_source_positions": ENCODED, "max_target_positions": CONTEXT, "num_mel_bins": 16,
        "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None}),
}


@dataclass(frozen=True)
class RecurrentModel:
    """A recurrent language model: its class, the class of its configuration, and the configuration."""

    model: str
    config: str
    settings: dict[str, Any]

    make = Decoder.make


RECURRENT = {"mamba": RecurrentModel("MambaForCausalLM", "MambaConfig", {
    "vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 16, "num_hidden_layers": LAYERS, "conv_kernel": 4,
    "expand": 2, "time_step_rank": 4, "use_mambapy": False})}


@dataclass(frozen=True)
class Encoder:
    """An encoder: its class, the class of its configuration, its inputs, and the configuration.

    Inputs are (1, S) integers, or of features the shape of one batch.
    """

    model: str
    config: str
    inputs: tuple[str, ...]
    settings: dict[str, Any]
    features: tuple[int, ...] = ()

    def make(self) -> nn.Module:
        """Return the module with random weights, in float32, ready for inference."""
        transformers()
        torch.manual_seed(0)
        config = getattr(package, self.config)(**self.settings, attn_implementation="eager")
        return seeded(getattr(package, self.model)(config))


_MASKED = ("input_ids", "attention_mask")
_SMALL = {**_COMMON, "hidden_size": 64, "intermediate_size": 96}
ENCODERS = {
    "bert": Encoder("BertModel", "BertConfig", (*_MASKED, "token_type_ids"), _SMALL),
    "roberta": Encoder("RobertaModel", "RobertaConfig", _MASKED, _SMALL),
    "mpnet": Encoder("MPNetModel", "MPNetConfig", _MASKED, _SMALL),
    "distilbert": Encoder("DistilBertModel", "DistilBertConfig", _MASKED, {
        "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "dim": 64, "n_layers": LAYERS, "n_heads": HEADS,
        "hidden_dim": 96}),
    "electra": Encoder("ElectraModel", "ElectraConfig", _MASKED, {**_SMALL, "embedding_size": 32}),
    "albert": Encoder("AlbertModel", "AlbertConfig", _MASKED, {**_SMALL, "embedding_size": 32}),
    "clip_text": Encoder("CLIPTextModel", "CLIPTextConfig", ("input_ids",), {
        **_SMALL, "bos_token_id": 0, "eos_token_id": VOCABULARY - 1}),
    "t5_encoder": Encoder("T5EncoderModel", "T5Config", _MASKED, {
        "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": LAYERS, "num_heads": HEADS}),
    "whisper_encoder": Encoder("WhisperModel", "WhisperConfig", ("input_features",), {
        "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS,
        "encoder_ffn_dim": 96, "decoder_layers": 1, "decoder_attention_heads": HEADS, "decoder_ffn_dim": 96,
        "max_source_positions": 20, "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}, (1, 16, 40)),
}
ENCODER_TOKENS = CONTEXT - 4
"The most tokens of an encoder: some of its positions are those of padding."


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


def make_inputs(decoder: Decoder, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Return what the module of a decoder reads besides token ids, for a mask (1, 1, T, E)."""
    end, steps = mask.shape[-1], ids.shape[-1]
    places = torch.arange(end - steps, end)
    masks: Any = mask
    if decoder.window is not None:
        far = torch.arange(end)[None] <= places[:, None] - decoder.window
        masks = {"full_attention": mask, "sliding_attention": mask + far.to(mask.dtype) * -40000.0}
    return {"attention_mask": masks, **({"position_ids": places[None]} if decoder.positions else {})}


class StatefulDecoder(nn.Module):
    """(ids, mask) -> logits, with the cache in buffers."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], decoder: Decoder | None = None) -> None:
        super().__init__()
        self.model, self.decoder = model, decoder
        self.cache = _StateCache(shape)
        self.register_buffer("keyCache", self.cache.k)
        self.register_buffer("valueCache", self.cache.v)

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, causal_mask: torch.Tensor) -> torch.Tensor:
        assert self.decoder is not None
        found: torch.Tensor = self.model(input_ids, **make_inputs(self.decoder, input_ids, causal_mask), use_cache=True,
                                         past_key_values=self._place_cache(input_ids, causal_mask)).logits
        return found

    def _place_cache(self, input_ids: torch.Tensor, causal_mask: torch.Tensor) -> _StateCache:
        """Return the cache in the buffers, at the position that the mask's length says."""
        self.cache.k, self.cache.v = self.keyCache, self.valueCache  # export puts stand-ins in the place of buffers
        self.cache.past = causal_mask.shape[-1] - input_ids.shape[-1]
        return self.cache


class StatelessDecoder(nn.Module):
    """(ids, mask, keys, values) -> logits, keys, values."""

    def __init__(self, model: nn.Module, decoder: Decoder) -> None:
        super().__init__()
        self.model, self.decoder = model, decoder

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, causal_mask: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        cache = _ConcatCache(k, v)
        logits = self.model(input_ids, **make_inputs(self.decoder, input_ids, causal_mask), past_key_values=cache,
                            use_cache=True).logits
        return logits, torch.stack([k for k, _ in cache.made]), torch.stack([v for _, v in cache.made])


class _PassedKeys(package.cache_utils.Cache):
    """No cache: the keys and values of an encoder are computed at each step."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return 0


class CrossAttendingDecoder(StatefulDecoder):
    """(ids, mask, encoder's output, and a mask of its keys if there is one) -> logits, with the cache in buffers."""

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, causal_mask: torch.Tensor, encoded: torch.Tensor,
                encoder_mask: torch.Tensor | None = None) -> torch.Tensor:
        caches = package.cache_utils.EncoderDecoderCache(self._place_cache(input_ids, causal_mask), _PassedKeys())
        found: torch.Tensor = self.model(
            encoder_outputs=package.modeling_outputs.BaseModelOutput(encoded), attention_mask=encoder_mask,
            decoder_input_ids=input_ids, decoder_attention_mask=causal_mask, past_key_values=caches,
            use_cache=True).logits
        return found


class _ReplacedStates(package.cache_utils.Cache):
    """States of layers in two buffers, each of which is replaced as a whole at each step."""

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.conv, self.recurrent = conv, recurrent
        # transformers before 5.24 read the states of a layer, and ask for them by these names
        self.layers = [SimpleNamespace(conv_states=[conv[number]], recurrent_states=[recurrent[number]],
                                       record_past=False) for number in range(len(conv))]

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.conv[layer_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.recurrent[layer_idx]

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_recurrent_state(self, state: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        self.recurrent[layer_idx] = state
        return state


class StepModel(nn.Module):
    """ids (1, 1) -> logits, with the states of the layers in buffers."""

    def __init__(self, model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.model = model
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = _ReplacedStates(self.convState, self.recurrentState)
        found: torch.Tensor = self.model(input_ids, cache_params=states, use_cache=True).logits
        return found


class EncoderOutputs(nn.Module):
    """Inputs -> the last hidden state, and the pooled one if there is one."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = getattr(model, "encoder", model) if "input_features" in names else model, names

    @torch.no_grad()
    def forward(self, *tensors: torch.Tensor) -> Any:
        found = self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=True)
        pooled = getattr(found, "pooler_output", None)
        return found.last_hidden_state if pooled is None else (found.last_hidden_state, pooled)


def make_mask(steps: int, end: int) -> np.ndarray[Any, Any]:
    """Return a causal mask for `steps` new positions of `end`, with a large negative finite value."""
    rows = np.arange(end - steps, end)[:, None]
    return np.where(np.arange(end)[None] <= rows, 0.0, -40000.0).astype(np.float16)[None, None]


def _convert_states(decoder: Decoder, path: Path, exported: bool = False) -> None:
    shape = decoder.get_cache_shape()
    module = StatefulDecoder(decoder.make(), shape, decoder).eval()
    example = (torch.zeros((1, 3), dtype=torch.int32), torch.zeros((1, 1, 3, 5)))
    states = [] if exported else [ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name)
                                  for name in ("keyCache", "valueCache")]
    ane.convert(
        _capture(module, example, exported), skip_model_load=True, minimum_deployment_target=ct.target.iOS18,
        inputs=_list_inputs(), outputs=[ct.TensorType("logits", dtype=np.float16)],
        **({"states": states} if states else {})).save(str(path))


def _convert_stateless(decoder: Decoder, path: Path, exported: bool = False) -> None:
    module = StatelessDecoder(decoder.make(), decoder).eval()
    cache = torch.zeros(decoder.get_cache_shape(4))
    example = (torch.zeros((1, 3), dtype=torch.int32), torch.zeros((1, 1, 3, 7)), cache, cache.clone())
    past = ct.RangeDim(lower_bound=1, upper_bound=CONTEXT - 1, default=1)
    ane.convert(
        _capture(module, example, exported), skip_model_load=True, minimum_deployment_target=ct.target.iOS18,
        inputs=[*_list_inputs(), *(ct.TensorType(name, decoder.get_cache_shape(past), dtype=np.float16)
                                   for name in ("keys", "values"))],
        outputs=[ct.TensorType(name, dtype=np.float16) for name in ("logits", "newKeys", "newValues")]).save(str(path))


def _list_inputs() -> list[Any]:
    steps, end = (ct.RangeDim(lower_bound=1, upper_bound=CONTEXT, default=1) for _ in range(2))
    return [ct.TensorType("inputIds", (1, steps), dtype=np.int32),
            ct.TensorType("causalMask", (1, 1, steps, end), dtype=np.float16)]


def _capture(module: nn.Module, example: tuple[torch.Tensor, ...], exported: bool) -> Any:
    """Trace a module, or export it with every axis flexible that can be."""
    if not exported:
        return torch.jit.trace(module, example, check_trace=False)
    auto = torch.export.Dim.AUTO
    axes = [{axis: auto for axis, size in enumerate(each.shape) if size > 1 and (each.ndim < 5 or axis == 3)}
            for each in example]
    return torch.export.export(module, example, dynamic_shapes=tuple(axes))


def _convert_cross(decoder: CrossDecoder, path: Path, flexible: bool = False) -> None:
    shape = (LAYERS, 1, HEADS, CONTEXT, WIDTH)
    module = CrossAttendingDecoder(decoder.make(), shape).eval()
    length: Any = ct.RangeDim(lower_bound=1, upper_bound=ENCODED, default=7) if flexible else ENCODED
    fixed = {"encoded": (1, length, HEADS * WIDTH), **({"encoderMask": (1, 1, 1, length)} if decoder.masked else {})}
    example = (torch.zeros((1, 3), dtype=torch.int32), torch.zeros((1, 1, 3, 5)), *(
        torch.zeros([7 if size is length else size for size in shape]) for shape in fixed.values()))
    ane.convert(
        torch.jit.trace(module, example, check_trace=False), skip_model_load=True,
        minimum_deployment_target=ct.target.iOS18,
        inputs=[*_list_inputs(), *(ct.TensorType(name, size, dtype=np.float16) for name, size in fixed.items())],
        outputs=[ct.TensorType("logits", dtype=np.float16)],
        states=[ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name)
                for name in ("keyCache", "valueCache")]).save(str(path))


def _convert_recurrent(recurrent: RecurrentModel, path: Path) -> None:
    model = recurrent.make()
    width = model.config.intermediate_size
    shapes = {"convState": (LAYERS, 1, width, model.config.conv_kernel),
              "recurrentState": (LAYERS, 1, width, model.config.state_size)}
    module = StepModel(model, shapes).eval()
    ane.convert(
        torch.jit.trace(module, torch.zeros((1, 1), dtype=torch.int32), check_trace=False), skip_model_load=True,
        minimum_deployment_target=ct.target.iOS18, inputs=[ct.TensorType("inputIds", (1, 1), dtype=np.int32)],
        outputs=[ct.TensorType("logits", dtype=np.float16)],
        states=[ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name)
                for name, shape in shapes.items()]).save(str(path))


def _convert_encoder(encoder: Encoder, path: Path) -> None:
    module = EncoderOutputs(encoder.make(), encoder.inputs).eval()
    tokens = ct.RangeDim(lower_bound=1, upper_bound=ENCODER_TOKENS, default=7)
    example: tuple[torch.Tensor, ...] = tuple(torch.ones((1, 7), dtype=torch.int32) for _ in encoder.inputs)
    inputs = [ct.TensorType(name, (1, tokens), dtype=np.int32) for name in encoder.inputs]
    if encoder.features:
        example, inputs = (torch.zeros(encoder.features),), [ct.TensorType(encoder.inputs[0], encoder.features)]
    traced = torch.jit.trace(module, example, check_trace=False)
    ane.convert(traced, skip_model_load=True, minimum_deployment_target=ct.target.iOS17, inputs=inputs).save(str(path))


_CONVERSIONS: dict[str, Callable[[Any, Path], None]] = {
    "states": _convert_states, "stateless": _convert_stateless, "encoder": _convert_encoder,
    "cross": _convert_cross, "cross, flexible": partial(_convert_cross, flexible=True), "recurrent": _convert_recurrent,
    f"states{EXPORTED}": partial(_convert_states, exported=True),
    f"stateless{EXPORTED}": partial(_convert_stateless, exported=True)}


def convert(name: str, form: str) -> Path:
    """Return the package of a model in a form; it is converted if this machine has not done so before."""
    versions = (torch.__version__, package.__version__, ct.__version__, Path(__file__).read_text(), _read_frontend())
    key = hashlib.sha256(repr(versions).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / "language_models" / key / f"{name}_{form.replace(', ', '_')}.mlpackage"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, silence_warnings():
            made = Path(folder) / path.name
            _CONVERSIONS[form]({**ENCODERS, **DECODERS, **MORE_DECODERS, **CROSS_DECODERS, **RECURRENT}[name], made)
            try:
                made.rename(path)
            except OSError:  # another process was first
                if not path.exists():
                    raise
    return path


@cache
def _read_frontend() -> str:
    """Return the source of the torch frontend, which the packages depend on."""
    return "".join(path.read_text() for path in sorted(Path(torch_frontend.__file__).parent.rglob("*.py")))
