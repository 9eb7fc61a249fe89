"""Small models of the architectures that apps hold as NeuralNetworks: written by hand, with random weights.

This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.lab.models.zoo import Architecture

__all__ = ["SMALL_MODELS"]

SEQ = nn.Sequential


class Chain(nn.Module):
    """A module whose `forward` is a function of it and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def cbr(inner: int, outer: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Module:
    """Make a convolution with a batch norm and an activation."""
    parts = [nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outer)]
    return SEQ(*parts, *([act()] if act else []))


def residual(part: nn.Module, act: Any = None) -> nn.Module:
    """Make `x + part(x)`, and an activation behind it."""
    return Chain(lambda m, x: m.act(x + m.part(x)), part=part, act=act() if act else nn.Identity())


def parallel(*parts: nn.Module) -> nn.Module:
    """Make parts side by side, whose results are joined."""
    return Chain(lambda m, x: torch.cat([part(x) for part in m.parts], 1), parts=nn.ModuleList(parts))


def squeeze_excite(channels: int, gate: Any = nn.Sigmoid) -> nn.Module:
    inner = SEQ(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, channels, 1), gate())
    return Chain(lambda m, x: x * m.inner(x), inner=inner)


def head(channels: int, classes: int = 10) -> nn.Module:
    return SEQ(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def lenet() -> nn.Module:
    return SEQ(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
               nn.Flatten(), nn.Linear(256, 84), nn.Tanh(), nn.Linear(84, 10))


def alexnet() -> nn.Module:
    return SEQ(nn.Conv2d(3, 16, 7, 2, 2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
               nn.Conv2d(16, 32, 5, padding=2, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Dropout(),
               nn.Linear(32 * 7 * 7, 10))


def vgg() -> nn.Module:
    return SEQ(cbr(3, 16), cbr(16, 16), nn.MaxPool2d(2), cbr(16, 32), cbr(32, 32), nn.MaxPool2d(2), head(32))


def resnet() -> nn.Module:
    return SEQ(cbr(3, 16), *(residual(SEQ(cbr(16, 16), cbr(16, 16, act=None)), nn.ReLU) for _ in range(3)), head(16))


def resnext() -> nn.Module:
    return SEQ(cbr(3, 32), *(residual(SEQ(cbr(32, 16, 1), cbr(16, 16, groups=4), cbr(16, 32, 1, act=None)), nn.ReLU)
                             for _ in range(2)), head(32))


def densenet() -> nn.Module:
    return SEQ(cbr(3, 8), *(parallel(nn.Identity(), cbr(8 + 4 * at, 4)) for at in range(4)), nn.AvgPool2d(2), head(24))


def inception() -> nn.Module:
    block = parallel(cbr(16, 8, 1), SEQ(cbr(16, 4, 1), cbr(4, 8)), SEQ(cbr(16, 4, 1), cbr(4, 8, 5)),
                     SEQ(nn.MaxPool2d(3, 1, 1), cbr(16, 8, 1)))
    return SEQ(cbr(3, 16, 7, 2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), block, head(32))


def inception_b() -> nn.Module:
    block = parallel(SEQ(nn.Conv2d(8, 8, (1, 7), padding=(0, 3)), nn.ReLU(), nn.Conv2d(8, 8, (7, 1), padding=(3, 0))),
                     SEQ(nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Conv2d(8, 8, 1)))
    return SEQ(cbr(3, 8), block, nn.ReLU(), head(16))


def mobilenet() -> nn.Module:
    return SEQ(cbr(3, 8, stride=2), *(SEQ(cbr(8, 8, groups=8), cbr(8, 8, 1)) for _ in range(3)), head(8))


def mobilenet_v2() -> nn.Module:
    return SEQ(cbr(3, 8, stride=2, act=nn.ReLU6), *(residual(SEQ(
        cbr(8, 24, 1, act=nn.ReLU6), cbr(24, 24, groups=24, act=nn.ReLU6), cbr(24, 8, 1, act=None)))
        for _ in range(2)), head(8))


def mobilenet_v3() -> nn.Module:
    return SEQ(cbr(3, 16, stride=2, act=nn.Hardswish), residual(SEQ(
        cbr(16, 32, 1, act=nn.Hardswish), cbr(32, 32, 5, groups=32, act=nn.Hardswish),
        squeeze_excite(32, nn.Hardsigmoid), cbr(32, 16, 1, act=None))), head(16))


def shuffle(m: Any, x: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    y = torch.cat([left, m.part(right)], 1)
    n, c, h, w = y.shape
    return y.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def shufflenet() -> nn.Module:
    return SEQ(cbr(3, 16), *(Chain(shuffle, part=SEQ(cbr(8, 8, 1), cbr(8, 8, groups=8, act=None), cbr(8, 8, 1)))
                             for _ in range(2)), head(16))


def squeezenet() -> nn.Module:
    def fire(inner: int) -> nn.Module:
        return SEQ(nn.Conv2d(inner, 4, 1), nn.ReLU(), parallel(SEQ(nn.Conv2d(4, 8, 1), nn.ReLU()),
                                                               SEQ(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())))
    return SEQ(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), fire(8), fire(16), nn.MaxPool2d(3, 2, ceil_mode=True), fire(16),
               nn.Conv2d(16, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def efficientnet() -> nn.Module:
    return SEQ(cbr(3, 8, stride=2, act=nn.SiLU), residual(SEQ(
        cbr(8, 24, 1, act=nn.SiLU), cbr(24, 24, 3, groups=24, act=nn.SiLU), squeeze_excite(24),
        cbr(24, 8, 1, act=None))), head(8))


def ghostnet() -> nn.Module:
    ghost = Chain(lambda m, x: torch.cat([m.a(x), m.b(m.a(x))], 1), a=cbr(8, 8, 1), b=cbr(8, 8, 3, groups=8))
    return SEQ(cbr(3, 8), ghost, head(16))


def cbam() -> nn.Module:
    spatial = Chain(lambda m, x: x * torch.sigmoid(m.conv(torch.cat([x.mean(1, keepdim=True),
                                                                     x.amax(1, keepdim=True)], 1))),
                    conv=nn.Conv2d(2, 1, 7, padding=3))
    return SEQ(cbr(3, 16), squeeze_excite(16), spatial, head(16))


def unet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        b = m.b(functional.max_pool2d(a, 2))
        return m.out(torch.cat([a, m.up(b)], 1))
    return Chain(run, a=cbr(3, 8), b=cbr(8, 16), up=nn.ConvTranspose2d(16, 8, 2, 2), out=nn.Conv2d(16, 4, 1))


def fcn() -> nn.Module:
    return SEQ(cbr(3, 16, stride=2), cbr(16, 16, stride=2), nn.Conv2d(16, 5, 1),
               nn.ConvTranspose2d(5, 5, 8, 4, 2, groups=5, bias=False))


def pspnet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = [functional.interpolate(part(functional.avg_pool2d(x, size)), scale_factor=float(size), mode="bilinear")
             for part, size in zip(m.parts, (2, 4, 8))]
        return m.out(torch.cat([x, *y], 1))
    return Chain(run, stem=cbr(3, 8), parts=nn.ModuleList(cbr(8, 4, 1) for _ in range(3)), out=nn.Conv2d(20, 4, 1))


def deeplab() -> nn.Module:
    parts = [nn.Conv2d(8, 8, 3, padding=rate, dilation=rate) for rate in (1, 2, 4)]
    return SEQ(cbr(3, 8, stride=2), parallel(*parts), nn.ReLU(), nn.Conv2d(24, 4, 1),
               nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))


def srcnn() -> nn.Module:
    return SEQ(nn.Conv2d(1, 16, 9, padding=4), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU(),
               nn.Conv2d(8, 1, 5, padding=2))


def espcn() -> nn.Module:
    return SEQ(nn.Conv2d(1, 16, 5, padding=2), nn.Tanh(), nn.Conv2d(16, 9, 3, padding=1), nn.PixelShuffle(3))


def edsr() -> nn.Module:
    body = [residual(SEQ(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)))
            for _ in range(3)]
    return SEQ(nn.Conv2d(3, 16, 3, padding=1), *body, nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2))


def dncnn() -> nn.Module:
    return residual(SEQ(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), cbr(16, 16), cbr(16, 16),
                        nn.Conv2d(16, 3, 3, padding=1)))


def autoencoder() -> nn.Module:
    return SEQ(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 3, 2, 1), nn.ELU(),
               nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.PReLU(8), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid())


def variational() -> nn.Module:
    return Chain(lambda m, x: (m.mean(m.stem(x)), m.scale(m.stem(x)).exp()), stem=SEQ(nn.Linear(64, 32), nn.Softplus()),
                 mean=nn.Linear(32, 8), scale=nn.Linear(32, 8))


def dcgan() -> nn.Module:
    return SEQ(nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1),
               nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())


def patchgan() -> nn.Module:
    return SEQ(nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.InstanceNorm2d(32),
               nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 4, 1, 1))


def style() -> nn.Module:
    block = residual(SEQ(nn.ReflectionPad2d(1), nn.Conv2d(16, 16, 3), nn.InstanceNorm2d(16, affine=True), nn.ReLU()))
    return SEQ(nn.ReflectionPad2d(4), nn.Conv2d(3, 16, 9), nn.InstanceNorm2d(16, affine=True), nn.ReLU(), block,
               nn.Upsample(scale_factor=2, mode="nearest"), nn.ReplicationPad2d(1), nn.Conv2d(16, 3, 3), nn.Tanh())


def yolo() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x)
        n, _, h, w = y.shape
        y = y.reshape(n, 3, 7, h * w).permute(0, 1, 3, 2).reshape(n, 3 * h * w, 7)
        return torch.cat([torch.sigmoid(y[..., :2]), y[..., 2:4], torch.sigmoid(y[..., 4:])], -1)
    return Chain(run, stem=SEQ(cbr(3, 16, stride=2, act=nn.LeakyReLU), cbr(16, 16, stride=2, act=nn.LeakyReLU),
                               nn.Conv2d(16, 21, 1)))


def spp() -> nn.Module:
    pools = [nn.Identity(), *(nn.MaxPool2d(size, 1, size // 2) for size in (5, 9, 13))]
    return SEQ(cbr(3, 8, stride=2, act=nn.Mish), parallel(*pools), cbr(32, 8, 1, act=nn.SiLU))


def ssd() -> nn.Module:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a = m.a(x)
        b = m.b(a)
        heads = [[part(y).permute(0, 2, 3, 1).flatten(1) for part, y in zip(parts, (a, b))]
                 for parts in (m.boxes, m.scores)]
        return torch.cat(heads[0], 1).reshape(1, -1, 4), torch.cat(heads[1], 1).reshape(1, -1, 5).softmax(-1)
    return Chain(run, a=cbr(3, 8, stride=4), b=cbr(8, 8, stride=2),
                 boxes=nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)),
                 scores=nn.ModuleList(nn.Conv2d(8, 10, 3, padding=1) for _ in range(2)))


def pyramid() -> nn.Module:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a = m.a(x)
        b = m.b(a)
        return m.out(m.side(a) + functional.interpolate(b, scale_factor=2.0, mode="nearest")), b
    return Chain(run, a=cbr(3, 8, stride=2), b=cbr(8, 8, stride=2), side=nn.Conv2d(8, 8, 1),
                 out=nn.Conv2d(8, 8, 3, padding=1))


def centernet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        heat = torch.sigmoid(m.heat(m.stem(x)))
        return heat * (functional.max_pool2d(heat, 3, 1, 1) == heat).float()
    return Chain(run, stem=cbr(3, 8, stride=2), heat=nn.Conv2d(8, 4, 1))


def hourglass() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.out(x + functional.interpolate(m.low(functional.max_pool2d(x, 2)), scale_factor=2.0))
    return Chain(run, stem=cbr(3, 16), low=SEQ(cbr(16, 16), cbr(16, 16)), out=nn.Conv2d(16, 5, 1))


def embedder() -> nn.Module:
    return Chain(lambda m, x: functional.normalize(m.net(x), dim=1), net=SEQ(cbr(3, 16, stride=2, act=nn.PReLU),
                                                                             head(16, 32)))


def blazeface() -> nn.Module:
    def block(m: Any, x: Tensor) -> Tensor:
        return functional.relu(m.conv(functional.pad(x, (0, 2, 0, 2)))
                               + functional.pad(functional.max_pool2d(x, 2), (0, 0, 0, 0, 0, 8)))
    conv = SEQ(nn.Conv2d(16, 16, 3, 2, groups=16), nn.Conv2d(16, 24, 1))
    return SEQ(cbr(3, 16, 5, 2), Chain(block, conv=conv), head(24))


def edges() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        b = functional.interpolate(m.side(m.b(a)), size=(32, 32), mode="bilinear", align_corners=False)
        return torch.sigmoid(m.out(torch.cat([m.top(a), b], 1)))
    return Chain(run, a=cbr(3, 8), b=cbr(8, 8, stride=2), top=nn.Conv2d(8, 1, 1), side=nn.Conv2d(8, 1, 1),
                 out=nn.Conv2d(2, 1, 1))


def text_cnn() -> nn.Module:
    def run(m: Any, ids: Tensor) -> Tensor:
        x = m.table(ids).transpose(1, 2)
        return m.out(torch.cat([functional.relu(conv(x)).amax(-1) for conv in m.convs], 1))
    return Chain(run, table=nn.Embedding(50, 16), convs=nn.ModuleList(nn.Conv1d(16, 8, size) for size in (2, 3, 4)),
                 out=nn.Linear(24, 4))


def fast_text() -> nn.Module:
    return Chain(lambda m, ids: m.out(m.table(ids).mean(1)), table=nn.Embedding(50, 16), out=nn.Linear(16, 4))


def mixer() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.patches(x).flatten(2).transpose(1, 2)
        x = x + m.tokens(m.a(x).transpose(1, 2)).transpose(1, 2)
        return m.out((x + m.channels(m.b(x))).mean(1))
    return Chain(run, patches=nn.Conv2d(3, 16, 8, 8), a=nn.LayerNorm(16), b=nn.LayerNorm(16),
                 tokens=SEQ(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
                 channels=SEQ(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), out=nn.Linear(16, 10))


def conv_mixer() -> nn.Module:
    return SEQ(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.BatchNorm2d(16), residual(SEQ(
        nn.Conv2d(16, 16, 5, groups=16, padding=2), nn.GELU(), nn.BatchNorm2d(16))), nn.Conv2d(16, 16, 1), nn.GELU(),
        head(16))


def attend(m: Any, x: Tensor) -> Tensor:
    n, s, c = x.shape
    q, k, v = m.qkv(x).reshape(n, s, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    y = ((q @ k.transpose(-1, -2)) * (c // 2) ** -0.5).softmax(-1) @ v
    return m.out(y.transpose(1, 2).reshape(n, s, c))


def attention(width: int) -> nn.Module:
    return Chain(attend, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))


def transformer() -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(2):
        parts += [residual(SEQ(nn.LayerNorm(16), attention(16))),
                  residual(SEQ(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))]
    return SEQ(*parts, nn.LayerNorm(16))


def vision_transformer() -> nn.Module:
    return Chain(lambda m, x: m.out(m.body(m.patches(x).flatten(2).transpose(1, 2)).mean(1)),
                 patches=nn.Conv2d(3, 16, 8, 8), body=transformer(), out=nn.Linear(16, 10))


def self_attention_gan() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        n, c, h, w = x.shape
        scores = torch.bmm(m.q(x).flatten(2).transpose(1, 2), m.k(x).flatten(2)).softmax(-1)
        return x + torch.bmm(m.v(x).flatten(2), scores.transpose(1, 2)).reshape(n, c, h, w)
    return Chain(run, stem=cbr(3, 8, stride=2), q=nn.Conv2d(8, 4, 1), k=nn.Conv2d(8, 4, 1), v=nn.Conv2d(8, 8, 1))


def recurrent(kind: Any, both: bool = False, layers: int = 1) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return Chain(lambda m, x: m.out(m.net(x)[0]),
                     net=kind(8, 12, num_layers=layers, batch_first=True, bidirectional=both),
                     out=nn.Linear(24 if both else 12, 5))
    return make


def crnn() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x).mean(2).permute(2, 0, 1)
        return m.out(m.net(y)[0]).log_softmax(-1)
    return Chain(run, stem=SEQ(cbr(1, 16, stride=2), cbr(16, 16, stride=2)), net=nn.LSTM(16, 12, bidirectional=True),
                 out=nn.Linear(24, 20))


def temporal() -> nn.Module:
    def part(rate: int) -> nn.Module:
        return residual(SEQ(nn.ConstantPad1d((2 * rate, 0), 0.0), nn.Conv1d(8, 8, 3, dilation=rate), nn.ReLU()))
    return SEQ(nn.Conv1d(4, 8, 1), part(1), part(2), part(4), nn.Conv1d(8, 2, 1))


def wavenet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return x + m.mix(torch.tanh(m.a(x)) * torch.sigmoid(m.b(x)))
    layers = [Chain(run, a=nn.Conv1d(8, 8, 3, padding=rate, dilation=rate),
                    b=nn.Conv1d(8, 8, 3, padding=rate, dilation=rate), mix=nn.Conv1d(8, 8, 1)) for rate in (1, 2, 4)]
    return SEQ(nn.Conv1d(1, 8, 1), *layers, nn.Conv1d(8, 16, 1))


def keywords() -> nn.Module:
    return SEQ(cbr(1, 16, 5, 2), *(SEQ(cbr(16, 16, groups=16), cbr(16, 16, 1)) for _ in range(2)), head(16))


def sound() -> nn.Module:
    return SEQ(nn.Conv1d(1, 8, 80, 4), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(8, 16, 3), nn.ReLU(),
               nn.AvgPool1d(4), nn.Flatten(), nn.Linear(16 * 29, 4))


def video() -> nn.Module:
    return SEQ(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)), nn.Conv3d(8, 8, 3, padding=1),
               nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 5))


def perceptron() -> nn.Module:
    return SEQ(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ELU(),
               nn.Linear(32, 10), nn.LogSoftmax(1))


def recommender() -> nn.Module:
    def run(m: Any, users: Tensor, items: Tensor) -> Tensor:
        u, i = m.users(users).flatten(1), m.items(items).flatten(1)
        return torch.sigmoid(m.net(torch.cat([u * i, u, i], 1)))
    return Chain(run, users=nn.Embedding(40, 8), items=nn.Embedding(40, 8),
                 net=SEQ(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1)))


def wide_and_deep() -> nn.Module:
    return Chain(lambda m, x: m.wide(x) + m.deep(x), wide=nn.Linear(20, 3),
                 deep=SEQ(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)))


def point_net() -> nn.Module:
    return SEQ(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1),
               Chain(lambda m, x: x.amax(2)), nn.Linear(32, 5))


def highway() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(m.gate(x))
        return gate * functional.relu(m.net(x)) + (1 - gate) * x
    return SEQ(*(Chain(run, gate=nn.Linear(16, 16), net=nn.Linear(16, 16)) for _ in range(3)))


def gated_convs() -> nn.Module:
    return SEQ(nn.Conv1d(8, 16, 3, padding=1), nn.GLU(1), nn.Conv1d(8, 16, 3, padding=1), nn.GLU(1))


def attention_pooling() -> nn.Module:
    return Chain(lambda m, x: (m.score(x).softmax(1) * m.value(x)).sum(1), score=nn.Linear(8, 1),
                 value=nn.Linear(8, 6))


def mixture() -> nn.Module:
    return Chain(lambda m, x: torch.stack([part(x) for part in m.parts], 1).mul(
        m.gate(x).softmax(-1).unsqueeze(-1)).sum(1), gate=nn.Linear(8, 3),
        parts=nn.ModuleList(nn.Linear(8, 6) for _ in range(3)))


def color() -> nn.Module:
    return SEQ(cbr(1, 8, stride=2), cbr(8, 16, stride=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Upsample(scale_factor=4),
               nn.Conv2d(16, 2, 3, padding=1), nn.Hardtanh(-2, 2))


def depth() -> nn.Module:
    return SEQ(cbr(3, 8, stride=2, act=nn.ELU), cbr(8, 16, stride=2, act=nn.ELU), nn.ConvTranspose2d(16, 8, 3, 2, 1, 1),
               nn.ELU(), nn.ConvTranspose2d(8, 1, 3, 2, 1, 1), nn.Softplus())


def counter() -> nn.Module:
    parts = [SEQ(nn.Conv2d(3, 4, size, padding=size // 2), nn.ReLU(), nn.MaxPool2d(2)) for size in (9, 7, 5)]
    return SEQ(parallel(*parts), nn.Conv2d(12, 1, 1))


def _make(name: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...], **options: Any) -> Architecture:
    return Architecture(f"{name}, small", "small", "torch", make, shapes, **options)


IMAGE, GRAY, SEQUENCE = (1, 3, 32, 32), (1, 1, 28, 28), (1, 10, 8)
SMALL_MODELS: tuple[Architecture, ...] = (
    _make("LeNet", lenet, GRAY), _make("AlexNet", alexnet, (1, 3, 64, 64)), _make("VGG", vgg, IMAGE),
    _make("ResNet", resnet, IMAGE), _make("ResNeXt", resnext, IMAGE), _make("DenseNet", densenet, IMAGE),
    _make("Inception", inception, IMAGE), _make("Inception-B", inception_b, IMAGE),
    _make("MobileNet", mobilenet, IMAGE),
    _make("MobileNetV2", mobilenet_v2, IMAGE), _make("MobileNetV3", mobilenet_v3, IMAGE),
    _make("ShuffleNet", shufflenet, IMAGE), _make("SqueezeNet", squeezenet, IMAGE),
    _make("EfficientNet", efficientnet, IMAGE), _make("GhostNet", ghostnet, IMAGE), _make("CBAM", cbam, IMAGE),
    _make("U-Net", unet, IMAGE), _make("FCN", fcn, IMAGE), _make("PSPNet", pspnet, IMAGE),
    _make("DeepLab", deeplab, IMAGE), _make("SRCNN", srcnn, (1, 1, 24, 24)), _make("ESPCN", espcn, (1, 1, 16, 16)),
    _make("EDSR", edsr, (1, 3, 16, 16)), _make("DnCNN", dncnn, IMAGE), _make("autoencoder", autoencoder, IMAGE),
    _make("variational encoder", variational, (1, 64)), _make("DCGAN", dcgan, (1, 16, 1, 1)),
    _make("PatchGAN", patchgan, IMAGE), _make("style transfer", style, IMAGE), _make("YOLO head", yolo, IMAGE),
    _make("SPP", spp, IMAGE), _make("SSD heads", ssd, IMAGE), _make("feature pyramid", pyramid, IMAGE),
    _make("CenterNet", centernet, IMAGE), _make("hourglass", hourglass, IMAGE),
    _make("face embedding", embedder, IMAGE),
    _make("BlazeFace", blazeface, IMAGE), _make("edge detection", edges, IMAGE),
    _make("TextCNN", text_cnn, (1, 12), ids=50), _make("fastText", fast_text, (1, 12), ids=50),
    _make("MLP-Mixer", mixer, IMAGE), _make("ConvMixer", conv_mixer, IMAGE),
    _make("Transformer", transformer, (1, 6, 16)),
    _make("ViT by hand", vision_transformer, IMAGE), _make("self-attention GAN", self_attention_gan, IMAGE),
    _make("LSTM", recurrent(nn.LSTM), SEQUENCE), _make("LSTM of 2 layers", recurrent(nn.LSTM, layers=2), SEQUENCE),
    _make("BiLSTM", recurrent(nn.LSTM, both=True), SEQUENCE), _make("GRU", recurrent(nn.GRU), SEQUENCE),
    _make("RNN", recurrent(nn.RNN), SEQUENCE), _make("CRNN (text in images)", crnn, (1, 1, 16, 32)),
    _make("TCN", temporal, (1, 4, 32)), _make("WaveNet", wavenet, (1, 1, 64)),
    _make("keyword spotting", keywords, (1, 1, 40, 20)), _make("M5 (sound)", sound, (1, 1, 2000)),
    _make("C3D (video)", video, (1, 3, 4, 16, 16)), _make("perceptron", perceptron, (1, 64)),
    _make("recommender", recommender, (1, 1), (1, 1), ids=40), _make("wide and deep", wide_and_deep, (1, 20)),
    _make("PointNet", point_net, (1, 3, 40)), _make("highway", highway, (1, 16)),
    _make("gated convolutions", gated_convs, (1, 8, 20)), _make("attention pooling", attention_pooling, SEQUENCE),
    _make("mixture of experts", mixture, (1, 8)), _make("colorization", color, (1, 1, 32, 32)),
    _make("depth", depth, IMAGE), _make("crowd counting", counter, IMAGE),
)
