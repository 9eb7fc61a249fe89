"""Whole modules for torch.jit.script, as people write them: the grid's row of scripted modules, and its verdicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import coremltools as ct
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import mil_ane_passes as ane

from ..checks import input_types, outputs, silence
from .cases import Outcome

__all__ = ["MODULES", "converted", "module_outcome", "scripted"]

X3 = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
X4 = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))


class Attributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.hop, self.scale, self.flag, self.sizes = 2, 0.5, True, [2, 8, -1]
        self.weight = nn.Parameter(torch.randn(8, 8, 3))

    def forward(self, x):
        x = F.pad(F.conv1d(x, self.weight, stride=self.hop) * self.scale, [self.hop, 0])
        if self.flag:
            x = x[:, :, self.hop:]
        return x.reshape(self.sizes[0], self.sizes[1], self.sizes[2])


class Branches(nn.Module):
    def forward(self, x):
        if x.dim() == 2:
            return x.unsqueeze(1)
        if x.dim() not in (3, 4):
            raise ValueError(f"expected 3 or 4 dimensions, got {x.dim()}")
        if x.size(1) == 8:
            return x.mean(1)
        return x


class Default(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x, mask: torch.Tensor | None = None):
        if mask is not None:
            x = x + mask
        return self.linear(x)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(16, 5, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


class LstmCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(16, 5)

    def forward(self, x):
        h, c = self.cell(x[:, 0])
        h, c = self.cell(x[:, 1], (h, c))
        return h + c


class GruCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(16, 5)

    def forward(self, x):
        h = torch.zeros(2, 5)
        for i in range(3):
            h = self.cell(x[:, i], h)
        return h


class RnnCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(16, 5)

    def forward(self, x):
        return self.cell(x[:, 1], self.cell(x[:, 0]))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x):
        return self.attention(x, x, x)


class AttentionWithoutWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


MODULES = {
    "attributes": (Attributes, X3), "branches": (Branches, X3), "default": (Default, X3), "loop": (Looped, X3),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), X3),
    "gru": (lambda: Recurrent(nn.GRU), X3), "lstm cell": (LstmCell, X3), "gru cell": (GruCell, X3),
    "attention": (Attention, X3), "batch norm 1d": (lambda: nn.BatchNorm1d(8), X3),
    "batch norm 2d": (lambda: nn.BatchNorm2d(8), X4), "group norm": (lambda: nn.GroupNorm(2, 8), X4),
    "instance norm": (lambda: nn.InstanceNorm2d(8), X4),
    "instance norm, running": (lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True), X3),
    "upsample": (lambda: nn.Upsample(scale_factor=2.0, mode="nearest"), X4),
    "upsample bilinear": (lambda: nn.Upsample(size=(9, 9), mode="bilinear"), X4),
    "conv same": (lambda: nn.Conv2d(8, 4, 3, padding="same"), X4),
    "conv reflect": (lambda: nn.Conv1d(8, 4, 3, padding=1, padding_mode="reflect"), X3),
    "conv circular": (lambda: nn.Conv1d(8, 4, 3, padding=1, padding_mode="circular"), X3),
    "transposed conv": (lambda: nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1), X3),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.3), nn.GELU(), nn.Softmax(-1)), X3),
    "pools": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), X4),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), torch.arange(10).reshape(2, 5)),
    "rnn cell": (RnnCell, X3), "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), X3),
    "attention without weights": (AttentionWithoutWeights, X3),
    "encoder layer, norm first": (lambda: nn.TransformerEncoderLayer(
        16, 2, 32, batch_first=True, norm_first=True, activation="gelu"), X3),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), X3),
}
"What each is called, how it is made, and what it is run on."


def scripted(make: Callable[[], nn.Module]) -> torch.jit.ScriptModule:
    torch.manual_seed(0)
    return torch.jit.script(make().eval())


def converted(module: torch.jit.ScriptModule, x: torch.Tensor, convert: Any = ane.convert) -> Any:
    return convert(module, inputs=input_types([x]), skip_model_load=True, compute_precision=ct.precision.FLOAT32,
                   minimum_deployment_target=ct.target.iOS17)


def module_outcome(name: str, patched: bool) -> Outcome:
    """Convert one module and compare its values with PyTorch."""
    make, x = MODULES[name]
    with redirect_stderr(StringIO()), silence():
        module = scripted(make)
        with torch.no_grad():
            expected = module(x)
        try:
            found = outputs(converted(module, x, ane.convert if patched else ct.convert), [x])
        except Exception as error:
            return Outcome("refused", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    wanted = [each.numpy() for each in (expected if isinstance(expected, tuple) else (expected,))]
    if [np.shape(one) for one in found] != [one.shape for one in wanted]:
        return Outcome("wrong", f"shapes {[np.shape(one) for one in found]} instead of {[one.shape for one in wanted]}")
    apart = max(float(np.max(np.abs(one - other))) for one, other in zip(found, wanted, strict=True))
    return Outcome("right") if apart <= 1e-4 else Outcome("wrong", f"values differ by up to {apart}")
