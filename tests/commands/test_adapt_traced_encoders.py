"""Encoders traced from PyTorch: forms of masks and of poolings, by coremltools and with the patched frontend."""

from __future__ import annotations

import json

import coremltools as ct
import numpy as np
import pytest

import mil_ane_passes as ane

torch = pytest.importorskip("torch")

WIDTH, MOST = 16, 12


class Encoder(torch.nn.Module):
    """One layer of attention, with a mask of one of several forms, and a pooling of one of several forms."""

    def __init__(self, mask: str, pooling: str) -> None:
        super().__init__()
        self.mask, self.pooling = mask, pooling
        self.table = torch.nn.Embedding(50, WIDTH)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids, mask):
        x = self.table(ids)
        q, k, v = (projection(x) for projection in self.projections)
        x = x + (q @ k.transpose(1, 2) / 4 + self.hide(mask)).softmax(-1) @ v
        return self.pool(x, ids, mask)

    def hide(self, mask):
        places = torch.arange(mask.shape[1])
        before = (places[None] <= places[:, None])[None]
        shown = mask.bool()
        if self.mask == "triangle":
            count = mask.shape[1]
            return torch.full((count, count), -1e4).triu(1)
        if self.mask == "read by index":
            return torch.where(before & shown[torch.arange(1)[:, None, None], places[None, None]], 0.0, -1e4)
        if self.mask == "causal":
            return torch.where(before & shown[:, None], torch.tensor(0.0), torch.finfo(torch.float32).min)
        if self.mask == "infinite":
            return torch.where(before & (mask[:, None] != 0), 0.0, float("-inf"))
        return (1 - mask[:, None].float()) * -1e4

    def pool(self, x, ids, mask):
        last = mask.sum(1) - 1
        if self.pooling == "indexed":
            return x[torch.arange(1), last]
        if self.pooling == "rows":
            return x[:, last]
        if self.pooling == "gathered":
            return x.gather(1, last[:, None, None].long().expand(1, 1, WIDTH))[:, 0]
        if self.pooling == "counted ids":
            return x[torch.arange(1), ids.ne(0).sum(1) - 1]
        if self.pooling == "mean":
            return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return x


def save_encoder(path, convert, module):
    length = ct.RangeDim(1, MOST, 7)
    with torch.no_grad():
        traced = torch.jit.trace(module, (torch.ones(1, 7, dtype=torch.int32),) * 2, check_trace=False)
    convert(traced, inputs=[ct.TensorType(name, (1, length), dtype=np.int32) for name in ("ids", "mask")],
            outputs=[ct.TensorType("out")], skip_model_load=True,
            minimum_deployment_target=ct.target.iOS17).save(str(path))
    return path


def run_packages(folder, ids, mask):
    """Run the lookups and the encoder on inputs that are padded as the manifest describes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    padded = {name: np.pad(value, [(0, 0), (0, MOST - value.shape[1])]) for name, value in (
        ("ids", ids), ("mask", mask)) if name in manifest["inputs"]}
    if manifest["length"] is not None:
        padded[manifest["length"]] = np.array([ids.shape[1]], np.int32)
    values = ane.runtime.predictor(folder / manifest["lookup"], precision="float32").predict(padded)
    main = ane.runtime.predictor(folder / manifest["main"], precision="float32")
    return main.predict({name: np.asarray(values[name]).astype(each["dtype"])
                         for name, each in manifest["lookups"].items()})["out"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("convert", [ct.convert, ane.convert], ids=["ct", "ane"])
@pytest.mark.parametrize(("mask", "pooling"), [
    ("triangle", "tokens"), ("read by index", "tokens"), ("causal", "tokens"), ("causal", "indexed"),
    ("infinite", "mean"), ("infinite", "tokens"), ("padding", "indexed"), ("padding", "rows"), ("padding", "gathered"),
    ("padding", "counted ids")])
def test_forms_of_masks_and_poolings(tmp_path, mask, pooling, convert):
    torch.manual_seed(0)
    module = Encoder(mask, pooling).eval()
    report = ane.adapt(save_encoder(tmp_path / "source.mlpackage", convert, module), tmp_path / "out")
    assert report.status == "written", str(report)
    for length, shown in ((1, 1), (5, 5), (9, 6), (MOST, MOST)):
        ids = np.random.default_rng(length).integers(1, 50, (1, length)).astype(np.int32)
        flags = (np.arange(length) < shown)[None].astype(np.int32)
        expected = module(torch.from_numpy(ids), torch.from_numpy(flags)).detach().numpy()
        found = run_packages(tmp_path / "out", ids, flags)
        found = found[:, :length] if pooling == "tokens" else found
        np.testing.assert_allclose(found, expected, atol=5e-3)


class Coordinates(torch.nn.Module):
    """Rows of tables at coordinates and at their difference, as those of LayoutLM."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.sizes = (torch.nn.Embedding(50, WIDTH) for _ in range(3))

    def forward(self, ids, boxes):
        x = self.table(ids) + self.places(boxes[:, :, 0]) + self.sizes(boxes[:, :, 2] - boxes[:, :, 0])
        return x + (x @ x.transpose(1, 2) / 16).softmax(-1) @ x


@pytest.mark.parametrize("convert", [ct.convert, ane.convert], ids=["ct", "ane"])
def test_rows_at_differences_of_integers(tmp_path, convert):
    torch.manual_seed(0)
    module, length = Coordinates().eval(), ct.RangeDim(1, MOST, 7)
    example = torch.ones(1, 7, dtype=torch.int32), torch.ones(1, 7, 4, dtype=torch.int32)
    convert(torch.jit.trace(module, example, check_trace=False), outputs=[ct.TensorType("out")], skip_model_load=True,
            inputs=[ct.TensorType("ids", (1, length), dtype=np.int32),
                    ct.TensorType("boxes", (1, length, 4), dtype=np.int32)],
            minimum_deployment_target=ct.target.iOS17).save(str(tmp_path / "source.mlpackage"))
    report = ane.adapt(tmp_path / "source.mlpackage", tmp_path / "out")
    assert report.status == "written", str(report)
