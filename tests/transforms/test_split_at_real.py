"""Cuts of packages of real models: the parts give what the whole gives, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import mil_ane_passes as ane
from tests.package import real

from .splitting import chained, check_parts, cut, draws, folder, same, values

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHARES = (0.2, 0.5, 0.9)


def check(source: Path, shares: tuple[float, ...] = SHARES) -> int:
    """How many of the places that lie at `shares` of all values the package could be cut at."""
    places, done = values(source), 0
    feeds = draws(source)
    whole = ane.run(source, feeds, state={})
    for value in dict.fromkeys(places[int(share * (len(places) - 1))] for share in shares):
        with folder() as where:
            try:
                _, parts = cut(source, [value], where)
            except ane.InputError as error:
                assert "the second part would be empty" in str(error) or "nothing uses" in str(error), error
                continue
            check_parts(source, parts)
            same(whole, chained(parts, feeds))
            done += 1
    return done


@pytest.mark.parametrize("name", ["conv_transpose_1d", "nothing_to_do"])
def test_fixtures(name):
    assert check(FIXTURES / f"{name}.mlpackage", (0.5,))


def test_a_convolutional_network_and_a_transformer(tmp_path):
    import coremltools as ct
    import torch

    torch.manual_seed(0)

    class Both(torch.nn.Module):
        """Convolutions with a skip connection, then a layer of attention over what they see."""

        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1)
            self.body = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16),
                                            torch.nn.GELU(), torch.nn.Conv2d(16, 16, 3, padding=1))
            self.query, self.key, self.value = (torch.nn.Linear(16, 16) for _ in range(3))
            self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 5)

        def forward(self, x):
            seen = torch.relu(self.stem(x))
            seen = seen + self.body(seen)
            tokens = self.norm(seen.flatten(2).transpose(1, 2))
            looks = torch.softmax(self.query(tokens) @ self.key(tokens).transpose(1, 2) * 0.25, -1)
            return self.head((tokens + looks @ self.value(tokens)).mean(1)).softmax(-1), seen.mean((2, 3))

    traced = torch.jit.trace(Both().eval(), torch.zeros(1, 3, 16, 16))
    model = ct.convert(traced, inputs=[ct.TensorType("x", (1, 3, 16, 16))], convert_to="mlprogram",
                       minimum_deployment_target=ct.target.iOS16, skip_model_load=True)
    model.save(str(tmp_path / "source.mlpackage"))
    assert check(tmp_path / "source.mlpackage", (0.3, 0.8)) == 2


@pytest.mark.slow
def test_real_architectures():
    with tempfile.TemporaryDirectory() as made:
        packages = real.make(real.given() or Path(made))
        done = {name: check(path) for name, path in packages.items()}
    assert sum(count >= 2 for count in done.values()) >= 30, done
