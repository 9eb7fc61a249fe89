"""Recurrent models with trained weights, as packages on PyPI carry them, and one codec without.

The packages are not imported, for they import what is not needed: their files are read, and the module is written here
or taken from the file. Install with `pip install --no-deps silero-vad resemblyzer g2p-en`, anywhere on the path.
This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

__all__ = ["RECURRENT_MODELS", "RecurrentModel"]


@dataclass(frozen=True)
class RecurrentModel:
    """One model: its package, how it is made, the inputs by name, and how far it may be from PyTorch's float64.

    That is a share of the largest output: `half` at float16; `full` at float64, where all that differs is that the
    converter adds the two biases of an LSTM in fp16. `ranges` are of inputs that are no standard normal numbers.
    `verified`: whether the equivalence check of its own accord passes. It runs an lstm's inside in fp32; on inputs at
    the ends of their ranges for many steps cells may grow to where fp16 is coarse, and more than rounding is then off.
    """

    name: str
    package: str
    make: Callable[[], nn.Module]
    inputs: dict[str, tuple[int, ...]]
    half: float
    full: float = 1e-3
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    proved: bool = True

    def missing(self) -> str:
        """Why this machine cannot make it, or an empty string."""
        return "" if importlib.util.find_spec(self.package) else f"needs {self.package}"

    def draw(self, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = {}
        for name, shape in self.inputs.items():
            low, high = self.ranges.get(name, (0.0, 0.0))
            numbers = torch.rand(shape, generator=generator) * (high - low) + low if name in self.ranges else \
                torch.randn(shape, generator=generator)
            drawn[name] = numbers.half().float()
        return drawn

    def module(self) -> nn.Module:
        """The model with weights that fp16 has."""
        torch.manual_seed(0)
        made = self.make().eval()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(parameter.half().float())
        return made


def _find_package_file(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / name


class VoiceActivityDetector(nn.Module):
    """silero-vad at 16 kHz: 32 ms of sound with 4 ms before them, and the state of its LSTM, which the caller keeps."""

    def __init__(self) -> None:
        super().__init__()
        from safetensors.torch import load_file

        held = load_file(_find_package_file("silero_vad", "data/silero_vad_16k.safetensors"))
        self.stft_conv = nn.Conv1d(1, 258, 256, 128, bias=False)
        self.conv1, self.conv2 = nn.Conv1d(129, 128, 3, 1, 1), nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3, self.conv4 = nn.Conv1d(64, 64, 3, 2, 1), nn.Conv1d(64, 128, 3, 1, 1)
        self.lstm = nn.LSTM(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)
        self.load_state_dict({f"{name.replace('lstm_cell', 'lstm')}{'_l0' * ('lstm' in name)}": value
                              for name, value in held.items()})

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.stft_conv(nn.functional.pad(x, (0, 64), "reflect").unsqueeze(1))
        x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        x, (h, c) = self.lstm(x.permute(2, 0, 1), (h, c))
        return self.final_conv(x.permute(1, 2, 0).relu()).sigmoid().mean(2), h, c


class SpeakerEncoder(nn.Module):
    """resemblyzer's encoder of a speaker's voice: 1.6 s of mel spectra through three LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        held = torch.load(_find_package_file("resemblyzer", "pretrained.pt"), map_location="cpu", weights_only=False)[
            "model_state"
        ]
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
        self.load_state_dict(held, strict=False)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        raw = self.linear(self.lstm(mels)[1][0][-1]).relu()
        return raw / raw.norm(dim=1, keepdim=True)


class GraphemeToPhoneme(nn.Module):
    """g2p_en: the GRU that reads a word of 11 letters, as their vectors, and the first steps of the one that speaks."""

    def __init__(self) -> None:
        super().__init__()
        held = np.load(_find_package_file("g2p_en", "checkpoint20.npz"))
        size, width = held["enc_w_hh"].shape[1], held["enc_w_ih"].shape[1]
        self.enc, self.dec = nn.GRU(width, size, batch_first=True), nn.GRU(width, size, batch_first=True)
        self.fc = nn.Linear(*held["fc_w"].shape[::-1])
        names = {"enc": self.enc, "dec": self.dec}
        for prefix, layer in names.items():
            layer.load_state_dict({f"{kind}_l0": torch.from_numpy(held[f"{prefix}_{kind[0]}_{kind.split('_')[1]}"])
                                   for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")})
        self.fc.load_state_dict({"weight": torch.from_numpy(held["fc_w"]), "bias": torch.from_numpy(held["fc_b"])})

    def forward(self, letters: torch.Tensor, spoken: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.dec(spoken, self.enc(letters)[1])[0])
        return logits


class CodecEncoder(nn.Module):
    """Encodec's encoder: convolutions, and two LSTMs with a skip past them."""

    def __init__(self) -> None:
        super().__init__()
        from tests.lab.models.zoo import _complete_torchvision

        _complete_torchvision()
        from transformers import EncodecConfig, EncodecModel

        self.encoder = EncodecModel(EncodecConfig(num_filters=8, hidden_size=32)).encoder

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.encoder(sound)
        return made


class Denoiser(nn.Module):
    """As small denoisers are built: two bidirectional GRUs between linears, a mask over spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(65, 48), nn.Linear(96, 65)
        self.gru = nn.GRU(48, 48, 2, batch_first=True, bidirectional=True)

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        return spectra * self.last(self.gru(self.first(spectra).tanh())[0]).sigmoid()


RECURRENT_MODELS = (
    RecurrentModel(
        "silero-vad",
        "silero_vad",
        VoiceActivityDetector,
        {"x": (1, 576), "h": (1, 1, 128), "c": (1, 1, 128)},
        4e-3,
        ranges={"x": (-0.5, 0.5), "h": (-1.0, 1.0), "c": (-1.0, 1.0)},
    ),
    RecurrentModel(
        "resemblyzer",
        "resemblyzer",
        SpeakerEncoder,
        {"mels": (1, 160, 40)},
        4e-3,
        ranges={"mels": (0.0, 0.5)},
        proved=False,
    ),
    RecurrentModel(
        "g2p_en",
        "g2p_en",
        GraphemeToPhoneme,
        {"letters": (1, 12, 256), "spoken": (1, 10, 256)},
        4e-3,
        1e-12,
        ranges={"letters": (-0.5, 0.5), "spoken": (-0.5, 0.5)},
    ),
    RecurrentModel("Encodec", "transformers", CodecEncoder, {"sound": (1, 1, 6400)}, 4e-3),
    RecurrentModel("denoiser", "torch", Denoiser, {"spectra": (1, 24, 65)}, 4e-3, 1e-12),
)
