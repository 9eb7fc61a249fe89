"""Models in JAX, converted by stablehlo-coreml with passes of ours, theirs, or both.

This file imports jax and stablehlo_coreml at its top: import it inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import coremltools as ct
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import stablehlo_coreml
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

import mil_ane_passes as ane

from .cases import Case

TARGET = ct.target.iOS18
Array = np.ndarray[Any, Any]


def _draw(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def decode(ids: Any) -> Any:
    """A layer of a decoder: embedding, RMSNorm, rotary positions, causal attention, gated MLP, logits."""
    vocabulary, width, heads, length = 64, 32, 4, ids.shape[1]
    table = _draw(0, vocabulary, width)
    x = jnp.asarray(table)[ids]

    def norm(y: Any) -> Any:
        return y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)

    def split(seed: int) -> Any:
        y = norm(x) @ _draw(seed, width, width, scale=width**-0.5)
        return y.reshape(1, length, heads, width // heads).transpose(0, 2, 1, 3)

    query, key, value = _rotate(split(1)), _rotate(split(2)), split(3)
    scores = query @ key.transpose(0, 1, 3, 2) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = (jax.nn.softmax(scores, axis=-1) @ value).transpose(0, 2, 1, 3).reshape(1, length, width)
    x = x + mixed @ _draw(4, width, width, scale=width**-0.5)
    gate, up, down = (_draw(5 + n, *shape, scale=0.2) for n, shape in enumerate([(32, 64), (32, 64), (64, 32)]))
    return norm(x + (jax.nn.silu(norm(x) @ gate) * (norm(x) @ up)) @ down) @ table.T


def _rotate(x: Any) -> Any:
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2], dtype=np.float32)[:, None] / 10000 ** (np.arange(half, dtype=np.float32) / half)
    first, second, cosine, sine = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def scan_gru(x: Any) -> Any:
    """A GRU as `lax.scan` over the steps of [T, N, C]."""
    width = x.shape[-1]
    inputs, hidden = (_draw(seed, 3, width, width, scale=width**-0.5) for seed in (0, 1))

    def step(state: Any, given: Any) -> tuple[Any, Any]:
        reset = jax.nn.sigmoid(given @ inputs[0] + state @ hidden[0])
        update = jax.nn.sigmoid(given @ inputs[1] + state @ hidden[1])
        new = jnp.tanh(given @ inputs[2] + reset * (state @ hidden[2]))
        state = update * state + (1 - update) * new
        return state, state

    return lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]


def run_conv_net(x: Any) -> Any:
    """A small convolutional network on [N, C, H, W]: strided, grouped and dilated convs, wide pools, group norm."""
    conv = partial(lax.conv_general_dilated, dimension_numbers=("NCHW", "OIHW", "NCHW"))
    y = jax.nn.gelu(conv(x, _draw(0, 16, 3, 7, 7, scale=0.1), (2, 2), "SAME"), approximate=False)
    y = y + jax.nn.softplus(conv(y, _draw(1, 16, 1, 3, 3, scale=0.3), (1, 1), "SAME", feature_group_count=16))
    groups = y.reshape(1, 4, -1)
    groups = (groups - groups.mean(-1, keepdims=True)) * lax.rsqrt(groups.var(-1, keepdims=True) + 1e-5)
    y = conv(groups.reshape(y.shape), _draw(2, 16, 16, 3, 3, scale=0.1), (1, 1), "SAME", rhs_dilation=(2, 2))
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 15, 15), (1, 1, 1, 1), "SAME")
    return jax.nn.log_softmax(y.mean(axis=(2, 3)) @ _draw(3, 16, 10), axis=-1)


def sum_phases(x: Any) -> Any:
    """An oscillator: phases summed up along time, and running products of decays."""
    return jnp.sin(jnp.cumsum(x, axis=-1) * 0.1) * jnp.cumsum(jax.nn.sigmoid(x), axis=-1)[..., ::-1]


def pick_top(x: Any) -> tuple[Any, Any]:
    """The largest of each row, and what stands at their places in another tensor."""
    values, places = lax.top_k(x, 5)
    return values, jnp.take_along_axis(jnp.tanh(x), places, axis=-1)


def find_largest(x: Any) -> Any:
    """The place of the largest of each row: two nested loops in StableHLO."""
    return jnp.argmax(x, axis=-1)


def upsample(x: Any) -> Any:
    """A vocoder's block: a wide 1-D conv, snake, a transposed conv by an lhs dilation."""
    conv = partial(lax.conv_general_dilated, dimension_numbers=("NCH", "OIH", "NCH"))
    y = conv(x, _draw(0, 16, 16, 31, scale=0.05), (1,), "SAME")
    y = y + jnp.sin(y) ** 2
    return jnp.tanh(conv(y, _draw(1, 8, 16, 8, scale=0.1), (1,), [(5, 5)], lhs_dilation=(4,)))


MODELS: dict[str, tuple[Callable[..., Any], Callable[[int], Array]]] = {
    "decoder": (decode, lambda seed: np.random.default_rng(seed).integers(0, 64, (1, 16), np.int32)),
    "GRU by `lax.scan`": (scan_gru, lambda seed: _draw(seed, 16, 1, 256)),
    "conv net": (run_conv_net, lambda seed: _draw(seed, 1, 3, 32, 32)),
    "cumsum": (sum_phases, lambda seed: _draw(seed, 2, 8, 256)),
    "top-k": (pick_top, lambda seed: _draw(seed, 4, 64)),
    "argmax": (find_largest, lambda seed: _draw(seed, 2, 16)),
    "vocoder": (upsample, lambda seed: _draw(seed, 1, 16, 128)),
}


WAYS: dict[str, Callable[..., ct.PassPipeline]] = {
    "plain": lambda **settings: stablehlo_coreml.build_pass_pipeline(),
    "ours on theirs": lambda **settings: ane.pipeline(stablehlo_coreml.build_pass_pipeline(), **settings),
    "theirs on ours": lambda **settings: stablehlo_coreml.build_pass_pipeline(ane.pipeline(**settings)),
}
"Pipelines that convert: theirs alone, and both in either order."


def make_cases() -> list[Case]:
    return [
        Case("stablehlo-coreml", name, draw, partial(_call, function), partial(_convert, function, draw), tuple(WAYS))
        for name, (function, draw) in MODELS.items()]


def _call(function: Callable[..., Any], feed: Array) -> list[Array]:
    return [np.asarray(each) for each in jax.tree.leaves(function(feed))]


def _convert(function: Callable[..., Any], draw: Callable[[int], Array], way: str, **settings: Any) -> Any:
    exported = jax.export.export(jax.jit(function))(draw(0))
    module = ir.Module.parse(exported.mlir_module(), context=mlir.make_ir_context())
    program = stablehlo_coreml.convert(module, minimum_deployment_target=TARGET)
    return ct.convert(program, source="milinternal", minimum_deployment_target=TARGET, skip_model_load=True,
                      pass_pipeline=WAYS[way](**settings))
