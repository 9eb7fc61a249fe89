"""A small decoder that keeps keys and values in registered buffers, written in place: one token a call."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAYERS, HEADS, SIZE, LONGEST, VOCABULARY = 2, 2, 8, 8, 20
WIDTH = HEADS * SIZE


class CachedDecoder(nn.Module):
    """`at` (int32, (1,)) is the place of the token; the places up to it are attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("k", torch.zeros(LAYERS, 1, HEADS, LONGEST, SIZE))
        self.register_buffer("v", torch.zeros(LAYERS, 1, HEADS, LONGEST, SIZE))

    def write(self, layer: int, at: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        raise NotImplementedError

    def seen(self, at: torch.Tensor) -> torch.Tensor:
        return torch.arange(LONGEST) <= at

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        seen = self.seen(at).view(1, LONGEST)
        for layer in range(LAYERS):
            query, key, value = self.project[layer](x).view(1, 1, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
            self.write(layer, at, key, value)
            mixed = scaled_dot_product_attention(query, self.k[layer], self.v[layer], attn_mask=seen)
            x = x + self.mix[layer](mixed.transpose(1, 2).reshape(1, 1, WIDTH))
        return self.head(x)


class IndexedCache(CachedDecoder):
    """The place is an index tensor."""

    def write(self, layer: int, at: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.k[layer, :, :, at] = key
        self.v[layer, :, :, at] = value


class SlicedCache(CachedDecoder):
    """The place is a slice with a computed begin."""

    def write(self, layer: int, at: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.k[layer : layer + 1, :, :, at : at + 1] = key
        self.v[layer : layer + 1, :, :, at : at + 1] = value


class ShiftedCache(CachedDecoder):
    """No place is computed: everything moves one to the left and the new token comes last."""

    def seen(self, at: torch.Tensor) -> torch.Tensor:
        return torch.arange(LONGEST - 1, -1, -1) <= at

    def write(self, layer: int, at: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.k[layer, :, :, :-1] = self.k[layer, :, :, 1:].clone()
        self.k[layer, :, :, -1:] = key
        self.v[layer, :, :, :-1] = self.v[layer, :, :, 1:].clone()
        self.v[layer, :, :, -1:] = value
