"""A small speech synthesiser as people build them: an LSTM over text, a sine source by a running sum, a HiFi-GAN.

It has what such models have: ops that leave the ANE between others that pay for it. Imports torch at its top.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.lab.models.tools import seed_weights
from tests.lab.models.vocoder_modules import Generator, LeakyRelu

FRAMES = 256


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.text = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.after = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = torch.relu(layer(x))
        x = self.text(x.transpose(1, 2))[0].transpose(1, 2)
        for layer in self.after:
            x = x + torch.relu(layer(x))
        return x


class Speaker(nn.Module):
    """From (1, width, frames) of text features to a waveform."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.encoder = Encoder(width)
        self.pitch = nn.Conv1d(width, 1, 3, padding=1)
        self.source = nn.Conv1d(1, width, 7, padding=3)
        self.vocoder = Generator(LeakyRelu, width, 256, (8, 4, 2), (3, 7), (1, 3))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.encoder(text)
        phase = torch.cumsum(torch.sigmoid(self.pitch(x)), dim=2)
        return self.vocoder(x + self.source(torch.sin(phase)))


def speaker() -> tuple[nn.Module, torch.Tensor]:
    model = seed_weights(Speaker(), 0, 0.1)
    return model.eval(), torch.randn(1, 256, FRAMES, generator=torch.Generator().manual_seed(0))
