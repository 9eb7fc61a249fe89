"""A U-Net as medical imaging has it: strided convolutions down, transposed ones with an output padding up, PReLU.

This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import torch
from torch import nn


def _make_block(transposed: bool, into: int, out: int, stride: int) -> nn.Sequential:
    if transposed:
        layer: nn.Module = nn.ConvTranspose2d(into, out, 3, stride, padding=1, output_padding=stride - 1)
    else:
        layer = nn.Conv2d(into, out, 3, stride, padding=1)
    return nn.Sequential(layer, nn.InstanceNorm2d(out), nn.PReLU())


class UNet(nn.Module):
    """`channels` of each level, from the finest; every level halves the image."""

    def __init__(self, channels: tuple[int, ...] = (16, 32, 48), classes: int = 4) -> None:
        super().__init__()
        ends = (3, *channels)
        self.down = nn.ModuleList([_make_block(False, into, out, 2) for into, out in zip(ends, channels)])
        self.up = nn.ModuleList([
            _make_block(True, channels[level] * (2 if level < len(channels) - 1 else 1), channels[max(level - 1, 0)], 2)
            for level in reversed(range(len(channels)))])
        self.head = nn.Conv2d(channels[0], classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        value = image
        for layer in self.down:
            value = layer(value)
            kept.append(value)
        for place, layer in enumerate(self.up):
            finer = kept.pop()
            value = layer(value if place == 0 else torch.cat([value, finer], 1))
        head: torch.Tensor = self.head(value)
        return head
