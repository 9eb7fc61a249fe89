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
