"""Programs of any size in two shapes: few large weights as in a language model, and many small ones in a tower."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program, Var

WEIGHT_OFFSET = (
    97  # values between the starts of two weights: odd and larger than a row's remainder, so no two are equal
)

# A language model: the sizes of a Llama of three billion weights, and how many tokens it reads at once.
HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, VOCABULARY, TOKENS = 3072, 8192, 24, 8, 128, 32_000, 64
LAYER_BYTES = 2 * HIDDEN * (2 * HEADS * HEAD + 2 * KEY_HEADS * HEAD + 3 * INNER)
EMBEDDING_BYTES = 2 * VOCABULARY * HIDDEN
QUANTIZED_BLOCK = 32

# A tower of layers.
WIDTH, LENGTH, KERNEL = 1024, 8, 4


class WeightViews:
    """Views of one random buffer: as many different weights as wanted for the memory of one."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer, self.taken = buffer, 0

    @classmethod
    def draw(cls, largest: int, count: int, fan_in: int, seed: int) -> WeightViews:
        generator = np.random.default_rng(seed)
        scale = (2.0 / fan_in) ** 0.5  # keeps the variance through a relu, however deep the chain
        values = generator.standard_normal(largest + WEIGHT_OFFSET * (count + 1), dtype=np.float32)
        values *= scale
        return cls(values.astype(np.float16))

    def quantize(self) -> WeightViews:
        """Return views of random int4 numbers from -7 to 7: the lowest bits of these.

        -8 is left out, so that their mean is 0: with another mean, the sums of a layer would grow beyond fp16.
        """
        from coremltools.converters.mil.mil import types
        from coremltools.converters.mil.mil.types.type_mapping import nptype_from_builtin

        numbers = (self.buffer.view(np.int16) & 15) - 8
        return WeightViews(np.where(numbers == -8, 0, numbers).astype(nptype_from_builtin(types.int4)))

    def __call__(self, *shape: int) -> np.ndarray:
        start = WEIGHT_OFFSET * self.taken
        self.taken += 1
        return self.buffer[start : start + math.prod(shape)].reshape(shape)


def make_tower(gigabytes: float, seed: int) -> Program:
    """1x1 convolutions, one 1-D conv_transpose with a bias in the middle, then linears; a relu after each."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    layers = max(2, round(gigabytes * 1e9 / (2 * WIDTH * WIDTH)) - KERNEL)
    weights, bias = WeightViews.draw(WIDTH * WIDTH * KERNEL, layers, WIDTH, seed), np.full(WIDTH, 0.01, np.float16)
    lift = np.linspace(-0.5, 0.5, WIDTH, dtype=np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, WIDTH, LENGTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        for _ in range(layers // 2):
            x = mb.relu(x=mb.conv(x=x, weight=weights(WIDTH, WIDTH, 1), bias=bias))
        x = mb.relu(x=mb.conv_transpose(
            x=x, weight=weights(WIDTH, WIDTH, KERNEL), bias=lift, strides=[2], pad_type="custom", pad=[1, 1],
            name="lift"))
        x = mb.transpose(x=x, perm=[0, 2, 1])
        for _ in range(layers - layers // 2):
            x = mb.relu(x=mb.linear(x=x, weight=weights(WIDTH, WIDTH), bias=bias))
        return mb.identity(x=x, name="output")

    return program


def make_language_model(gigabytes: float, seed: int, quantized: bool = False) -> Program:
    """A decoder as coremltools converts it from PyTorch: RMS norms in parts, rotary positions, grouped queries, a gated
    feed forward, and one matrix for both ends.

    If `quantized`, the weights of linear layers are int4 with an fp16 scale for 32 numbers of a row.
    """
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    layer_bytes = LAYER_BYTES * (0.5 + 2 / QUANTIZED_BLOCK) / 2 if quantized else LAYER_BYTES
    layers = max(1, round((gigabytes * 1e9 - EMBEDDING_BYTES) / layer_bytes))
    made = _DecoderBuilder(mb, WeightViews.draw(max(VOCABULARY, INNER) * HIDDEN, 10 * layers, HIDDEN, seed), quantized)

    @mb.program(input_specs=[mb.TensorSpec((1, TOKENS), dtype=types.int32)], opset_version=ct.target.iOS18)
    def program(ids: Var) -> Var:
        table = mb.const(val=made.weights(VOCABULARY, HIDDEN), name="embedding")
        x = mb.gather(x=table, indices=ids, axis=0, validate_indices=False)
        for _ in range(layers):
            x = mb.add(x=x, y=made.attention(made.norm(x)))
            x = mb.add(x=x, y=made.feed_forward(made.norm(x)))
        return mb.matmul(x=made.norm(x), y=table, transpose_y=True, name="output")

    return program


class _DecoderBuilder:
    """The parts of a layer."""

    def __init__(self, mb: Any, weights: WeightViews, quantized: bool) -> None:
        self.mb, self.weights, self.numbers = mb, weights, weights.quantize() if quantized else None
        angle = np.outer(np.arange(TOKENS), 10_000.0 ** -np.linspace(0, 1, HEAD // 2, endpoint=False))
        self.cos, self.sin = (np.tile(f(angle), 2).astype(np.float16) for f in (np.cos, np.sin))
        self.mask = np.triu(np.full((TOKENS, TOKENS), -1e4, np.float16), 1)

    def linear(self, x: Var, *shape: int) -> Var:
        """Multiply by a weight of `shape` (outputs, inputs)."""
        if self.numbers is None:
            return self.mb.linear(x=x, weight=self.weights(*shape))
        scale = np.full((shape[0], shape[1] // QUANTIZED_BLOCK), (2.0 / shape[1]) ** 0.5 / 4, np.float16)
        weight = self.mb.constexpr_blockwise_shift_scale(data=self.numbers(*shape), scale=scale)
        return self.mb.linear(x=x, weight=weight)

    def norm(self, x: Var) -> Var:
        mb = self.mb
        squares = mb.reduce_mean(x=mb.pow(x=x, y=np.float16(2)), axes=[-1], keep_dims=True)
        scale = mb.rsqrt(x=mb.add(x=squares, y=np.float16(1e-5)), epsilon=np.float16(1e-7))
        return mb.mul(x=mb.mul(x=x, y=scale), y=1 + self.weights(HIDDEN))

    def attention(self, x: Var) -> Var:
        mb = self.mb
        query, key = self._turned(self._heads(x, HEADS)), self._turned(self._heads(x, KEY_HEADS))
        key, value = self._repeated(key), self._repeated(self._heads(x, KEY_HEADS))
        scores = mb.mul(x=mb.matmul(x=query, y=key, transpose_y=True), y=np.float16(HEAD**-0.5))
        mixed = mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=self.mask), axis=-1), y=value)
        flat = mb.reshape(x=mb.transpose(x=mixed, perm=[0, 2, 1, 3]), shape=[1, TOKENS, HEADS * HEAD])
        return self.linear(flat, HIDDEN, HEADS * HEAD)

    def feed_forward(self, x: Var) -> Var:
        mb = self.mb
        gate = mb.silu(x=self.linear(x, INNER, HIDDEN))
        wide = mb.mul(x=gate, y=self.linear(x, INNER, HIDDEN))
        return self.linear(wide, HIDDEN, INNER)

    def _heads(self, x: Var, count: int) -> Var:
        made = self.linear(x, count * HEAD, HIDDEN)
        return self.mb.transpose(x=self.mb.reshape(x=made, shape=[1, TOKENS, count, HEAD]), perm=[0, 2, 1, 3])

    def _turned(self, x: Var) -> Var:
        mb = self.mb
        ends = {"begin_mask": [True] * 3 + [False], "end_mask": [True] * 4}
        back = mb.slice_by_index(x=x, begin=[0, 0, 0, HEAD // 2], end=[0] * 4, **ends)
        front = mb.slice_by_index(
            x=x, begin=[0] * 4, end=[0, 0, 0, HEAD // 2], begin_mask=[True] * 4, end_mask=[True] * 3 + [False])
        turned = mb.concat(values=[mb.mul(x=back, y=np.float16(-1)), front], axis=-1)
        return mb.add(x=mb.mul(x=x, y=self.cos), y=mb.mul(x=turned, y=self.sin))

    def _repeated(self, x: Var) -> Var:
        mb = self.mb
        tiled = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, HEADS // KEY_HEADS, 1, 1])
        return mb.reshape(x=tiled, shape=[1, HEADS, TOKENS, HEAD])


SHAPES: dict[str, Callable[[float, int], Program]] = {
    "llm": make_language_model, "llm-int4": partial(make_language_model, quantized=True), "tower": make_tower}
