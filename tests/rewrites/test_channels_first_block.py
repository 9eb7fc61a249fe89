"""ANE519: transformer blocks on (B, C, 1, S), against PyTorch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from torch import nn

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.pipeline import select_rewrites
from tests.rewrites.helpers import configure_rewrite, converted_as, half, kinds, only_output, torch_outputs

NAME = "channels_first_block"

rule = partial(configure_rewrite, NAME)


class Attention(nn.Module):
    def __init__(self, width, heads, causal=0):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        if causal:
            self.register_buffer("mask", torch.triu(torch.full((causal, causal), -1e4), 1))

    def forward(self, x, memory):
        def split(value):
            return value.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        scores = split(self.q(x)) @ split(self.k(memory)).transpose(-1, -2) * 0.35
        if hasattr(self, "mask"):
            scores = scores + self.mask
        return self.out((torch.softmax(scores, -1) @ split(self.v(memory))).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a ViT or of Whisper's encoder (norm first), or of BERT (norm last)."""

    def __init__(self, width=32, heads=4, norm_first=True, causal=0):
        super().__init__()
        self.first, self.norm_first = Attention(width, heads, causal), norm_first
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        if self.norm_first:
            y = self.norms[0](x)
            x = x + self.first(y, y)
            return x + self.mlp(self.norms[1](x))
        x = self.norms[0](x + self.first(x, x))
        return self.norms[1](x + self.mlp(x))


class Encoder(nn.Module):
    """Whisper's encoder: two convs, positions, two blocks, a norm."""

    def __init__(self, width=32):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(8, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1))
        self.positions = nn.Parameter(torch.randn(10, width))
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width))

    def forward(self, x):
        return self.blocks(self.convs(x).transpose(1, 2) + self.positions)


class Decoder(nn.Module):
    """A decoder's block: causal attention, and one over a memory of another length."""

    def __init__(self, width=32):
        super().__init__()
        self.own, self.cross = Block(width, causal=12), Attention(width, 2)
        self.register_buffer("memory", torch.randn(1, 7, width))

    def forward(self, x):
        x = self.own(x)
        return x + self.cross(x, self.memory * x[:, :1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("module", "shape"), [
    (Block, (1, 12, 32)), (partial(Block, norm_first=False), (2, 12, 32)), (partial(Block, causal=12), (1, 12, 32)),
    (Encoder, (1, 8, 20)), (Decoder, (1, 12, 32)), (partial(Block, heads=1), (1, 12, 32))])
@pytest.mark.parametrize("way", ["traced", "exported"])
def test_blocks_of_models(module, shape, way, tmp_path):
    torch.manual_seed(0)
    layer, x = half(module().eval()), torch.randn(shape)
    held = converted_as(layer, x, way, tmp_path / "m.mlpackage")
    old, linears = only_output(held, x.numpy(), "float16"), kinds(held)["linear"]
    (output,) = [var.name for var in held.functions["main"].outputs]
    convs = kinds(held)["conv"]
    assert apply_rewrite(rule(), held).fired and not kinds(held)["linear"] and not kinds(held)["matmul"]
    assert kinds(held)["conv"] == linears + convs and [var.name for var in held.functions["main"].outputs] == [output]
    assert not apply_rewrite(rule(), held).fired
    true = torch_outputs(layer, x)
    scale = np.abs(true).max()
    assert np.abs(only_output(held, x.numpy(), "float64") - true).max() <= 2e-3 * scale
    error = np.abs(only_output(held, x.numpy(), "float16") - true).max()
    assert error <= 2 * np.abs(old - true).max() + 2e-3 * scale


def test_transposes_stand_at_the_ends_alone(tmp_path):
    """Those of keys aside: two blocks have two, and what enters from a transposed conv is not transposed again."""
    held = converted_as(Encoder().eval(), torch.randn(1, 8, 20), "traced", tmp_path / "m.mlpackage")
    assert kinds(held)["transpose"] == 9
    apply_rewrite(rule(), held)
    assert kinds(held)["transpose"] == 3 and kinds(held)["expand_dims"] == kinds(held)["squeeze"] == 1


def test_no_preset_has_it():
    assert NAME not in [each.name for each in select_rewrites("full")]


def test_compressed_weights_stay_so():
    def body(x):
        weight = mb.constexpr_affine_dequantize(quantized_data=np.eye(8, dtype=np.int8), zero_point=np.int8(0),
                                                scale=np.float16(0.5), axis=0)

        def heads():
            return mb.transpose(x=mb.reshape(x=mb.linear(x=x, weight=weight), shape=[1, 6, 2, 4]), perm=[0, 2, 1, 3])

        made = mb.matmul(x=mb.softmax(x=mb.matmul(x=heads(), y=heads(), transpose_y=True)), y=heads())
        return mb.linear(x=mb.reshape(x=mb.transpose(x=made, perm=[0, 2, 1, 3]), shape=[1, 6, 8]), weight=weight,
                         name="y")

    held = build_program(body, x=(1, 6, 8))
    x = np.random.default_rng(0).standard_normal((1, 6, 8)).astype(np.float16)
    before = only_output(held, x, "float64")
    assert apply_rewrite(rule(), held).fired and kinds(held)["constexpr_affine_dequantize"] == 1
    np.testing.assert_allclose(only_output(held, x, "float64"), before, rtol=0, atol=1e-12)


def test_what_stays_as_it_is(tmp_path):
    class Several(nn.Module):
        """Sizes that are read in between: each value that is returned is another end."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            found = []
            for block in self.blocks:
                x = block(x)
                found.append(x.softmax(1))
            return torch.cat(found, 0)

    held = converted_as(Several().eval(), torch.randn(1, 12, 32), "traced", tmp_path / "m.mlpackage")
    (miss,) = find_matches(rule(), held).near_misses
    assert miss.reason == "5 values enter or leave 48 convertible ops, more than 4 (max_ends)"
    assert find_matches(rule(max_ends=5), held).fired
