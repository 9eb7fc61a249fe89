"""`--fix-shape` on real architectures, beside coremltools' own way, which runs all its passes anew."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest

import mil_ane_passes as ane
from tests.lab.versions.needs import older_than
from tests.package.helpers import WEIGHTS, host_program, spec_of

torch = pytest.importorskip("torch")
LENGTH = ct.RangeDim(2, 16, default=7)
LISTED = ct.EnumeratedShapes([(2, 7), (2, 12), (2, 16)], default=(2, 7))
NAMES = ("bert", "gpt2", "llama", "opt", "qwen2", "t5-encoder")


def language(name: str, path: Path, shape: Any) -> Path:
    """A small text model of `transformers` with random weights, its ids and mask of a flexible length."""
    pytest.importorskip("transformers", reason="the model is one of transformers")
    from tests.torch_frontend.checks import captured, convert_captured
    from tests.torch_frontend.models.language import LANGUAGE

    model = LANGUAGE[name]()
    inputs = [ct.TensorType(name=each, shape=shape, dtype=np.int32) for each in ("ids", "mask")]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mlmodel = convert_captured(captured(model.module, model.example, "trace"), model.example, "trace",
                                   inputs=inputs, target=ct.target.iOS18)
    mlmodel.save(str(path))
    return path


class Encoder(torch.nn.Module):
    """One layer of attention over ids, causal and masked, with learned positions."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(100, width), torch.nn.Embedding(128, width)
        self.norm, self.heads = torch.nn.LayerNorm(width), heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, ids: Any, mask: Any) -> Any:
        batch, length = ids.shape
        x = self.words(ids) + self.places(torch.arange(length))[None]
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        late = torch.triu(torch.full((length, length), -1e4), 1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + late + (1.0 - mask[:, None, None, :].float()) * -1e4
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


def seeded(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind().eval()


def encoder(path: Path, shape: Any) -> Path:
    ids, model = torch.arange(14).view(2, 7), seeded(Encoder)
    with torch.no_grad(), ane.torch_frontend.patched():
        traced = torch.jit.trace(model, (ids, torch.ones_like(ids)), check_trace=False)
        ct.convert(traced, inputs=[ct.TensorType(name=name, shape=shape, dtype=np.int32) for name in ("ids", "mask")],
                   minimum_deployment_target=ct.target.iOS18, skip_model_load=True).save(str(path))
    return path


class Net(torch.nn.Module):
    """A small image network with a size read back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.body = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        first = torch.relu(self.norm(self.stem(x)))
        second = torch.nn.functional.interpolate(torch.relu(self.body(first)), scale_factor=2.0)
        both = second[:, :, : first.shape[2], : first.shape[3]] + first
        return self.head(both.flatten(2).mean(2))


def image_net(path: Path) -> Path:
    side, model = ct.RangeDim(16, 128, default=32), seeded(Net)
    with torch.no_grad(), ane.torch_frontend.patched():
        traced = torch.jit.trace(model, torch.rand(1, 3, 32, 32))
        ct.convert(traced, inputs=[ct.TensorType("x", shape=(1, 3, side, side))], skip_model_load=True,
                   minimum_deployment_target=ct.target.iOS18).save(str(path))
    return path


def values(path: Path, function: str = "main") -> dict[str, tuple[str, str, Any]]:
    """Each value's kind of op, dtype and shape as coremltools reads the file."""
    found = {}
    for op in host_program(path).functions[function].operations:
        for var in op.outputs:
            found[var.name] = (op.op_type, str(var.dtype), tuple(map(str, var.shape)))
    return found


def kinds(path: Path, function: str = "main") -> list[str]:
    """The types of the ops that are no consts."""
    return sorted(op.op_type for op in host_program(path).functions[function].operations if op.op_type != "const")


def hosts(source: Path, shapes: dict[str, Any]) -> Path:
    """What coremltools makes of it."""
    target = source.with_name("host.mlpackage")
    flexible = ct.models.MLModel(str(source), skip_model_load=True)
    ct.utils.materialize_dynamic_shape_mlmodel(flexible, {"main": shapes}, str(target))
    return target


def compare(source: Path, shapes: dict[str, Any], feeds: dict[str, Any]) -> Path:
    """Fixes the shapes; asserts that results are the same bits where the report says so, and types those that
    coremltools finds."""
    made = source.with_name("fixed.mlpackage")
    report = ane.edit(source, made, fix_shape=shapes)
    assert report.changed and "keep a flexible shape" not in str(report)
    for precision in ("float32", "float16"):
        before, after = (ane.run(path, feeds, precision=precision) for path in (source, made))
        for name, value in before.items():
            bound = 0.0 if report.exact else 1e-5 * float(np.abs(value).max())
            assert value.shape == after[name].shape and float(np.abs(value - after[name]).max()) <= bound, name
    ours, theirs = values(made), values(hosts(source, shapes))
    # Its passes give names such as add_0 again, to other ops, and constants new ones.
    shared = [name for name in ours.keys() & theirs.keys() if ours[name][0] == theirs[name][0] != "const"
              and not re.fullmatch(rf"{ours[name][0]}_\d+\w*", name)]
    assert len(shared) >= 3 and all(ours[name] == theirs[name] for name in shared)
    assert "ANE504" not in {finding["code"] for finding in ane.lint(made).to_dict()["findings"]}
    assert spec_of(made).description.metadata == spec_of(source).description.metadata
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_language_model_of_a_ranged_length(name, tmp_path):
    source = language(name, tmp_path / "source.mlpackage", (2, LENGTH))
    made = compare(source, {"ids": (2, 11), "mask": (2, 11)}, text(11))
    assert not {"shape", "fill", "range_1d"} & set(kinds(made))


def text(length: int) -> dict[str, Any]:
    """Ids and a mask whose second row is padded."""
    ids = np.random.default_rng(0).integers(0, 50, (2, length)).astype(np.int32)
    mask = np.ones((2, length), np.int32)
    mask[1, :3] = 0
    return {"ids": ids, "mask": mask}


def test_an_encoder_of_a_ranged_length(tmp_path):
    source = encoder(tmp_path / "source.mlpackage", (2, LENGTH))
    made = compare(source, {"ids": (2, 11), "mask": (2, 11)}, text(11))
    # With numpy 1 the divisor is known only now; coremltools' passes then make a product of the division, we do not.
    ours, theirs = (sorted("mul" if kind == "real_div" else kind for kind in kinds(path))
                    for path in (made, source.with_name("host.mlpackage")))
    assert not Counter(ours) - Counter(theirs)
    if older_than("9.1") and not older_than("9.0"):
        # It counts ids that may be negative from the end once more, when its passes see the gather again.
        assert Counter(theirs) - Counter(ours) == Counter(cast=2, add=1, greater_equal=1, select=1)
    with torch.no_grad():
        truth = seeded(Encoder)(*(torch.from_numpy(value).long() for value in text(11).values()))
    got = next(iter(ane.run(made, text(11)).values()))
    assert np.abs(got - truth.numpy()).max() < 1e-2, "weights are fp16"


def test_enumerated_lengths_become_functions_that_share_the_weights(tmp_path):
    source = encoder(tmp_path / "source.mlpackage", LISTED)
    made = tmp_path / "fixed.mlpackage"
    ane.edit(source, made, fix_shape=[{"ids": (2, size), "mask": (2, size)} for size in (7, 12, 16)])
    old, new = ((path / WEIGHTS).read_bytes() for path in (source, made))
    assert len(new) < 1.2 * len(old)
    for size in (7, 12, 16):
        before, after = ane.run(source, text(size)), ane.run(made, text(size), function=f"main_2x{size}_2x{size}")
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_an_image_network(tmp_path):
    source = image_net(tmp_path / "source.mlpackage")
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 3, 48, 80)).astype(np.float32)}
    made = compare(source, {"x": (1, 3, 48, 80)}, feeds)
    assert kinds(made) == kinds(source.with_name("host.mlpackage"))


