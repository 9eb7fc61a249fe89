"""What runtime-gather advises: the lookup becomes a package of its own, and the rest has no lookup left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import nn

import mil_ane_passes as ane
from tests.package import real

from .splitting import chained, check_parts, cut, draws, same, takes

MODELS = ("GPT-2", "GPT-2, mask as input", "BERT", "BERT, mask as input", "RoBERTa, mask as input", "DistilBERT",
          "Llama", "T5")


class Block(nn.Module):
    def __init__(self, width, causal):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal = causal

    def forward(self, x):
        query, key, value = self.mixed(self.first(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) * 0.25
        if self.causal:
            scores = scores + torch.full(scores.shape[1:], -1e4).triu(1)
        x = x + self.out(scores.softmax(-1) @ value)
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class LikeGPT2(nn.Module):
    """Tokens and positions are looked up; the head has the weights of the tokens' table."""

    def __init__(self, causal=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(Block(16, causal), Block(16, causal))
        self.norm = nn.LayerNorm(16)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(8))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class LikeBERT(LikeGPT2):
    """Types of segments are an input, too."""

    def __init__(self):
        super().__init__(causal=False)
        self.kinds = nn.Embedding(3, 16)

    def forward(self, ids, kinds):
        x = self.tokens(ids) + self.positions(torch.arange(8)) + self.kinds(kinds)
        return self.norm(self.blocks(self.norm(x)))[:, 0].tanh()


def lookups(path):
    """The values that lint names as lookups at places known only at run time."""
    report = ane.lint(path, target="m4")
    return [item.value for item in report.findings if item.rule.name == "runtime_gather"]


def check(path: Path, folder: Path) -> None:
    named = lookups(path)
    assert named
    feeds = draws(path)
    whole = ane.run(path, feeds)
    _, (first, second) = cut(path, named, folder)
    check_parts(path, [first, second])
    same(whole, chained([first, second], feeds))
    assert not lookups(second) and set(named) <= set(takes(second))
    for name in named:
        assert ane.load(second).program.functions["main"].inputs[name].dtype.__name__ == "fp16"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["iOS16", "iOS18"])
@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("make", [LikeGPT2, LikeBERT])
def test_the_lookup_of_a_transformer_becomes_a_package_of_its_own(make, way, target, tmp_path):
    torch.manual_seed(0)
    model, ids = make().eval(), torch.arange(8, dtype=torch.int32)[None]
    inputs = (ids,) if make is LikeGPT2 else (ids, ids % 2)
    if way == "exported":
        source, settings = torch.export.export(model, inputs).run_decompositions({}), {}
    else:
        source = torch.jit.trace(model, inputs)
        settings = {"inputs": [ct.TensorType(shape=(1, 8), dtype=np.int32) for _ in inputs]}
    made = ct.convert(source, convert_to="mlprogram", skip_model_load=True,
                      minimum_deployment_target=getattr(ct.target, target), **settings)
    made.save(str(tmp_path / "model.mlpackage"))
    check(tmp_path / "model.mlpackage", tmp_path)


@pytest.mark.slow
def test_real_architectures():
    with tempfile.TemporaryDirectory() as made:
        packages = real.make(real.given() or Path(made), MODELS)
        assert len(packages) >= 2
        for name, path in packages.items():
            with tempfile.TemporaryDirectory() as folder:
                print(name)
                check(path, Path(folder))
