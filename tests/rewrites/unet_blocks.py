"""Blocks of the UNet of Stable Diffusion 1.5 in plain torch, with its layer shapes and random weights.

A residual block (group norms, SiLU, a time embedding), a transformer block (self- and cross-attention, GEGLU), and
what changes the resolution. `channels` are 320, 640 or 1280 in the model, at sides of 64, 32, 16 and 8.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

TIME, TEXT, TOKENS, HEADS = 1280, 768, 77, 8


class Residual(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))) + time))), with a 1x1 conv around it where the channels change."""

    def __init__(self, inner, channels):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, inner), nn.GroupNorm(32, channels)])
        self.convs = nn.ModuleList([nn.Conv2d(inner, channels, 3, padding=1),
                                    nn.Conv2d(channels, channels, 3, padding=1)])
        self.time = nn.Linear(TIME, channels)
        self.around = nn.Identity() if inner == channels else nn.Conv2d(inner, channels, 1)

    def forward(self, x, time):
        hidden = self.convs[0](functional.silu(self.norms[0](x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        return self.around(x) + self.convs[1](functional.silu(self.norms[1](hidden)))


class Attention(nn.Module):
    def __init__(self, channels, source):
        super().__init__()
        self.query = nn.Linear(channels, channels, bias=False)
        self.key, self.value = (nn.Linear(source, channels, bias=False) for _ in range(2))
        self.out = nn.Linear(channels, channels)

    def forward(self, x, source):
        def split(value):
            return value.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(source)), split(self.value(source))
        return self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """A 1x1 conv, self-attention, cross-attention to the text, GEGLU, and a 1x1 conv, each with its residual."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels, eps=1e-6)
        self.first, self.last = (nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(channels) for _ in range(3)])
        self.attentions = nn.ModuleList([Attention(channels, channels), Attention(channels, TEXT)])
        self.wide, self.narrow = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x, text):
        _, _, high, wide = x.shape
        hidden = self.first(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norms[0](hidden)
        hidden = hidden + self.attentions[0](normed, normed)
        hidden = hidden + self.attentions[1](self.norms[1](hidden), text)
        value, gate = self.wide(self.norms[2](hidden)).chunk(2, -1)
        hidden = hidden + self.narrow(value * functional.gelu(gate))
        return x + self.last(hidden.transpose(1, 2).unflatten(2, (high, wide)))


class Down(nn.Module):
    """A residual block, a transformer block, and a conv of stride 2."""

    def __init__(self, inner, channels):
        super().__init__()
        self.residual, self.transformer = Residual(inner, channels), Transformer(channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x, time, text):
        return self.down(self.transformer(self.residual(x, time), text))


class Up(nn.Module):
    """What the way down left is joined, a residual and a transformer block, twice the size, and a conv."""

    def __init__(self, inner, channels):
        super().__init__()
        self.residual, self.transformer = Residual(inner + channels, channels), Transformer(channels)
        self.up = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, skipped, time, text):
        x = self.transformer(self.residual(torch.cat([x, skipped], 1), time), text)
        return self.up(functional.interpolate(x, scale_factor=2.0, mode="nearest"))


def make_inputs(side, *channels):
    """Maps of `channels` and `side`, the embedding of the time step, and the text."""
    generator = torch.Generator().manual_seed(1)
    shapes = [*[(1, each, side, side) for each in channels], (1, TIME), (1, TOKENS, TEXT)]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)
