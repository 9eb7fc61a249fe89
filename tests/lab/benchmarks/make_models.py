"""Models of known size with random weights, in plain torch, and programs to measure memory on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program
from torch import nn


def make_convolution(incoming: int, outgoing: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(incoming, outgoing, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outgoing))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, and the input added; the stride is at the 3x3, as torchvision has it."""

    def __init__(self, incoming: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            make_convolution(incoming, width, 1),
            nn.ReLU(True),
            make_convolution(width, width, 3, stride),
            nn.ReLU(True),
            make_convolution(width, 4 * width, 1),
        )
        same = stride == 1 and incoming == 4 * width
        self.skip = nn.Identity() if same else make_convolution(incoming, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.layers(x).add_(self.skip(x)))


def make_resnet50(batch: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ResNet-50 for 1,000 classes, 224 x 224: 25,557,032 parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [make_convolution(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    incoming = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(incoming, width, 1 if index else stride))
            incoming = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(incoming, 1000)).eval()
    parameters = sum(each.numel() for each in model.parameters())
    if parameters != 25_557_032:
        raise AssertionError(f"a ResNet-50 has 25,557,032 parameters, this one {parameters}")
    return model, (torch.randn(batch, 3, 224, 224),)


def make_encoder(layers: int = 12) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A transformer encoder of BERT base's size: 12 layers, width 768, 12 heads, 128 positions."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        # The layers start as copies of one; equal weights would be stored once.
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.02)
    return model, (torch.randn(1, 128, 768),)


class Residual(nn.Module):
    """Dilated convolutions in pairs, each pair added to what it reads."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(nn.LeakyReLU(0.1), nn.Conv1d(width, width, kernel, 1, kernel // 2 * apart, apart),
                          nn.LeakyReLU(0.1), nn.Conv1d(width, width, kernel, 1, kernel // 2)) for apart in (1, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = x + pair(x)
        return x


class Vocoder(nn.Module):
    """HiFi-GAN V1: 80 mel bands to 256 samples for each frame, through 1-D transposed convolutions with a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, 1, 3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in (8, 8, 2, 2):
            self.ups.append(nn.ConvTranspose1d(width, width // 2, 2 * rate, rate, rate // 2))
            width //= 2
            self.blocks.append(nn.ModuleList(Residual(width, kernel) for kernel in (3, 7, 11)))
        self.last = nn.Conv1d(width, 1, 7, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, blocks in zip(self.ups, self.blocks):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = (blocks[0](x) + blocks[1](x) + blocks[2](x)) / 3
        return torch.tanh(self.last(nn.functional.leaky_relu(x)))


def make_vocoder(width: int = 512, frames: int = 16) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """As published 13.9 million weights; twice the width has four times as many."""
    torch.manual_seed(0)
    return Vocoder(width).eval(), (torch.randn(1, 80, frames),)


class Attention(nn.Module):
    """Attention of `heads` heads, in which `groups` queries share one head of keys and values."""

    def __init__(self, width: int, heads: int, groups: int = 1, bias: bool = True, key_bias: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, inner = heads, groups, width // groups
        self.query, self.key = nn.Linear(width, width, bias=bias), nn.Linear(width, inner, bias=bias and key_bias)
        self.value, self.out = nn.Linear(width, inner, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, turn: Any = None) -> torch.Tensor:
        heads = (self.heads, self.heads // self.groups, self.heads // self.groups)
        query, key, value = (each(x).unflatten(-1, (count, -1)).transpose(1, 2)
                             for each, count in zip((self.query, self.key, self.value), heads))
        if turn is not None:
            query, key = turn(query), turn(key)
        if self.groups > 1:
            key, value = (each.repeat_interleave(self.groups, 1) for each in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A transformer layer, whose norms are before what they are for, or after it."""

    def __init__(self, width: int, heads: int, first: bool, epsilon: float = 1e-5, key_bias: bool = True) -> None:
        super().__init__()
        self.first, self.attention = first, Attention(width, heads, key_bias=key_bias)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=epsilon) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        one, two = self.norms
        if self.first:
            x = x + self.attention(one(x), mask)
            return x + self.outer(nn.functional.gelu(self.inner(two(x))))
        x = one(x + self.attention(x, mask))
        return two(x + self.outer(nn.functional.gelu(self.inner(x))))


class VisionTransformer(nn.Module):
    """ViT-B/16 for 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 768)), nn.Parameter(torch.randn(1, 197, 768))
        self.layers = nn.Sequential(*(Layer(768, 12, True, 1e-6) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(768, eps=1e-6), nn.Linear(768, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token, self.patches(x).flatten(2).transpose(1, 2)], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


class Bert(nn.Module):
    """BERT base: embeddings of 30,522 words, and a mask of the tokens to see."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(count, 768) for count in (30_522, 512, 2))
        self.norm = nn.LayerNorm(768, eps=1e-12)
        self.layers = nn.ModuleList(Layer(768, 12, False, 1e-12) for _ in range(12))
        self.pooler = nn.Linear(768, 768)

    def forward(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]] + self.kinds.weight[0]
        x, mask = self.norm(x), (1.0 - seen[:, None, None, :]) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return torch.tanh(self.pooler(x[:, 0]))


class WhisperEncoder(nn.Module):
    """The encoder of Whisper base: 3,000 frames of 80 bands, 1,500 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(80, 512, 3, 1, 1), nn.Conv1d(512, 512, 3, 2, 1)
        self.places = nn.Parameter(torch.randn(1500, 512))
        self.layers = nn.Sequential(*(Layer(512, 8, True, key_bias=False) for _ in range(6)))
        self.norm = nn.LayerNorm(512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x))))
        return self.norm(self.layers(x.transpose(1, 2) + self.places))


class LlamaBlock(nn.Module):
    """A layer of Llama 3.2 1B: grouped queries, rotary positions, a gated feed forward, RMS norms."""

    def __init__(self, tokens: int, width: int = 2048, heads: int = 32, groups: int = 4, inner: int = 8192) -> None:
        super().__init__()
        self.attention = Attention(width, heads, groups, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        size = width // heads
        angle = torch.outer(torch.arange(tokens), 500_000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("mask", torch.full((tokens, tokens), -1e4).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x, 0), self.mask, self.turn)
        y = self.norm(x, 1)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    def norm(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.norms[number]

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        front, back = x.chunk(2, -1)
        return x * self.cos + torch.cat([-back, front], -1) * self.sin


def _check_size(model: nn.Module, expected: int) -> nn.Module:
    parameters = sum(each.numel() for each in model.parameters())
    if parameters != expected:
        raise AssertionError(f"a {type(model).__name__} has {expected:,} parameters, this one {parameters:,}")
    return model.eval()


def make_vision_transformer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return _check_size(VisionTransformer(), 86_567_656), (torch.randn(1, 3, 224, 224),)


def make_bert() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """128 tokens, of which all but the last 16 are seen."""
    torch.manual_seed(0)
    ids, seen = torch.randint(0, 30_522, (1, 128), dtype=torch.int32), torch.ones(1, 128)
    seen[:, -16:] = 0
    return _check_size(Bert(), 109_482_240), (ids, seen)


def make_whisper_encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return _check_size(WhisperEncoder(), 20_590_592), (torch.randn(1, 80, 3000),)


def make_llama_block(tokens: int = 128) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return _check_size(LlamaBlock(tokens), 60_821_504), (torch.randn(1, tokens, 2048),)


def export_model(model: nn.Module, example: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """As coremltools can convert it: not with the fused kernels of torch's own layers, which eager uses."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return torch.export.export(model, example).run_decompositions({})
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


#: name -> (model, example inputs)
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "resnet50": make_resnet50,
    "resnet50-batch4": lambda: make_resnet50(4),
    "vit-b": make_vision_transformer,
    "bert-base": make_bert,
    "whisper-encoder": make_whisper_encoder,
    "llama-block": make_llama_block,
    "encoder": make_encoder,
    "encoder-small": lambda: make_encoder(1),
    "vocoder": make_vocoder,
    "vocoder-small": lambda: make_vocoder(64, 8),
}


def make_small_program() -> Program:
    """A convolution and a matrix product, to have the libraries loaded."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 32, 32))], opset_version=ct.target.iOS17)
    def made(x: Any) -> Any:
        x = mb.conv(x=x, weight=np.ones((16, 8, 3, 3), np.float32), pad_type="same")
        return mb.softmax(x=mb.linear(x=x, weight=np.ones((64, 32), np.float32)), axis=-1)

    return made


def make_chain_program(count: int = 1000, extent: int = 1 << 20) -> Program:
    """`count` elementwise ops of many kinds, one after the other, on `extent` numbers."""
    kinds: list[Callable[[Any], Any]] = [
        lambda x: mb.gelu(x=x, mode="EXACT"),
        lambda x: mb.add(x=x, y=0.5),
        lambda x: mb.silu(x=x),
        lambda x: mb.leaky_relu(x=x, alpha=0.1),
        lambda x: mb.softplus(x=x),
        lambda x: mb.real_div(x=x, y=1.5),
        lambda x: mb.elu(x=x, alpha=0.5),
        lambda x: mb.rsqrt(x=mb.abs(x=x)),
        lambda x: mb.layer_norm(x=x, axes=[-1]),
        lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"),
        lambda x: mb.softmax(x=x, axis=1),
        lambda x: mb.clip(x=x, alpha=-1.0, beta=1.0),
    ]

    @mb.program(input_specs=[mb.TensorSpec((1, 64, extent // 64))], opset_version=ct.target.iOS17)
    def made(x: Any) -> Any:
        for index in range(count):
            x = kinds[index % len(kinds)](x)
        return x

    return made
