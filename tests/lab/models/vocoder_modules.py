"""The torch modules behind tests.lab.models.vocoder. This file imports torch at its top: import it inside functions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

LEAKY_RELU_SLOPE = 0.1


def _compute_same_padding(kernel: int, dilation: int = 1) -> int:
    return dilation * (kernel - 1) // 2


def _make_low_pass_filter(ratio: int, kernel: int) -> torch.Tensor:
    """A Kaiser-windowed sinc of unit sum, (1, 1, kernel), that cuts at half the lower rate."""
    time = torch.arange(kernel) - (kernel - 1) / 2
    window = torch.kaiser_window(kernel, periodic=False, beta=5.0)
    taps = window * torch.sinc(time / ratio)
    return (taps / taps.sum()).view(1, 1, kernel)


class Snake(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.exp(self.alpha.unsqueeze(0).unsqueeze(-1))
        b = torch.exp(self.beta.unsqueeze(0).unsqueeze(-1))
        return x + (1.0 / (b + 1e-9)) * torch.pow(torch.sin(x * a), 2)


class AntiAliasedSnake(nn.Module):
    """Up by `ratio`, snake, down by `ratio`; depthwise filters; edges replicated."""

    def __init__(self, channels: int, ratio: int = 2, kernel: int = 12) -> None:
        super().__init__()
        self.snake = Snake(channels)
        self.channels, self.ratio, self.kernel = channels, ratio, kernel
        self.register_buffer("low_pass", _make_low_pass_filter(ratio, kernel), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taps, pad = self.low_pass.expand(self.channels, -1, -1), self.kernel // self.ratio - 1
        left = pad * self.ratio + (self.kernel - self.ratio) // 2
        right = pad * self.ratio + (self.kernel - self.ratio + 1) // 2
        x = F.pad(x, (pad, pad), mode="replicate")
        x = self.ratio * F.conv_transpose1d(x, taps, stride=self.ratio, groups=self.channels)
        x = self.snake(x[..., left:-right])
        x = F.pad(x, (self.kernel // 2 - (self.kernel + 1) % 2, self.kernel // 2), mode="replicate")
        return F.conv1d(x, taps, stride=self.ratio, groups=self.channels)


class LeakyRelu(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(x, LEAKY_RELU_SLOPE)


class ResidualBlock(nn.Module):
    def __init__(self, activation: type[nn.Module], channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=_compute_same_padding(kernel, d))
            for d in dilations
        )
        self.second = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, padding=_compute_same_padding(kernel)) for _ in dilations
        )
        self.activations = nn.ModuleList(activation(channels) for _ in range(2 * len(dilations)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            y = first(self.activations[2 * i](x))
            x = x + second(self.activations[2 * i + 1](y))
        return x


class Generator(nn.Module):
    """conv_pre, stages of one ConvTranspose1d and the mean of several residual blocks, activation, conv_post, tanh.

    As in the published models, the activation before the transposed convolution exists for leaky_relu only.
    """

    def __init__(
        self,
        activation: type[nn.Module],
        mel: int,
        channels: int,
        rates: tuple[int, ...],
        kernels: tuple[int, ...],
        dilations: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.blocks_per_stage, self.plain = len(kernels), activation is LeakyRelu
        self.conv_pre = nn.Conv1d(mel, channels, 7, padding=3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            kernel = 2 * rate + rate % 2  # the same parity as the rate: the length grows by exactly the rate
            self.ups.append(nn.ConvTranspose1d(channels, channels // 2, kernel, rate, padding=(kernel - rate) // 2))
            channels //= 2
            self.blocks.extend(ResidualBlock(activation, channels, k, dilations) for k in kernels)
        self.activation_post = activation(channels)
        self.conv_post = nn.Conv1d(channels, 1, 7, padding=3, bias=self.plain)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        x = self.conv_pre(mel)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, LEAKY_RELU_SLOPE) if self.plain else x)
            first = stage * self.blocks_per_stage
            x = sum(self.blocks[first + i](x) for i in range(self.blocks_per_stage)) / self.blocks_per_stage
        return torch.tanh(self.conv_post(self.activation_post(x)))
