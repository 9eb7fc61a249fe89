"""Small models of pictures and of series, random weights: DINOv2, PatchTST, and the last two nets of MTCNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .language import First, Model, seeded, transformers


class RNet(nn.Module):
    """MTCNN's second net: a PReLU of one slope a channel follows a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 28, 3), nn.PReLU(28), nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(28, 48, 3), nn.PReLU(48), nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(48, 64, 2), nn.PReLU(64))
        self.dense = nn.Sequential(nn.Linear(576, 128), nn.PReLU(128))
        self.face, self.box = nn.Linear(128, 2), nn.Linear(128, 4)

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.features(picture).permute(0, 3, 2, 1).contiguous()
        x = self.dense(x.view(x.shape[0], -1))
        return self.box(x), torch.softmax(self.face(x), dim=1)


class ONet(nn.Module):
    """MTCNN's last net."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.PReLU(32), nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(32, 64, 3), nn.PReLU(64), nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(64, 64, 3), nn.PReLU(64), nn.MaxPool2d(2, 2, ceil_mode=True),
            nn.Conv2d(64, 128, 2), nn.PReLU(128))
        self.dense = nn.Sequential(nn.Linear(1152, 256), nn.PReLU(256))
        self.face, self.box, self.marks = nn.Linear(256, 2), nn.Linear(256, 4), nn.Linear(256, 10)

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.features(picture).permute(0, 3, 2, 1).contiguous()
        x = self.dense(x.view(x.shape[0], -1))
        return self.box(x), self.marks(x), torch.softmax(self.face(x), dim=1)


def _mtcnn(net: type[nn.Module], size: int) -> Model:
    torch.manual_seed(0)
    return Model(seeded(net()), (torch.randn(2, 3, size, size),))


def _model(class_name: str, config_name: str, *example: tuple[int, ...], names: tuple[str, ...],
           **config: Any) -> Model:
    package = transformers()
    torch.manual_seed(0)
    built = getattr(package, class_name)(getattr(package, config_name)(**config))
    return Model(seeded(First(built, *names)), tuple(torch.randn(shape) for shape in example))


VISION: dict[str, Callable[[], Model]] = {
    "mtcnn-rnet": lambda: _mtcnn(RNet, 24),
    "mtcnn-onet": lambda: _mtcnn(ONet, 48),
    "dinov2": lambda: _model("Dinov2Model", "Dinov2Config", (1, 3, 28, 42), names=("pixel_values",),
                             hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28,
                             patch_size=7),
    "patchtst": lambda: _model("PatchTSTForPrediction", "PatchTSTConfig", (2, 32, 3), names=("past_values",),
                               num_input_channels=3, context_length=32, patch_length=8, patch_stride=4,
                               prediction_length=6, d_model=32, num_hidden_layers=2, num_attention_heads=4,
                               ffn_dim=64),
}
FLEXIBLE_IMAGES: dict[str, Callable[[], Model]] = {
    "dinov2": VISION["dinov2"],
    "yolos": lambda: _model("YolosModel", "YolosConfig", (1, 3, 32, 48), names=("pixel_values",), image_size=[32, 48],
                            patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                            intermediate_size=32, num_detection_tokens=5),
    "swin2sr": lambda: _model("Swin2SRForImageSuperResolution", "Swin2SRConfig", (1, 3, 16, 24),
                              names=("pixel_values",), image_size=16, embed_dim=16, depths=[1, 1], num_heads=[2, 2],
                              window_size=8, upscale=2, upsampler="pixelshuffledirect"),
}
"""Models of images of any size: tables of positions that are resized, and windows of images that are padded by
reflection."""
