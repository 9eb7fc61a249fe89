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
        self.table = torch.nn.Embedding(2000 if mask == "made of ids" else 50, WIDTH)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.sink = torch.nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, ids, mask):
        x = self.table(ids)
        q, k, v = (projection(x) for projection in self.projections)
        if self.mask == "filled and turned":  # the tables of positions are stored rounded
            q, k = turn(q), turn(k)
        scores = q @ k.transpose(1, 2) / 4 + self.hide(mask)
        if self.mask in ("filled", "filled and turned", "made of ids"):
            places = torch.arange(ids.shape[1])
            before = (places[None] <= places[:, None])[None]
            shown = mask.bool() if self.mask != "made of ids" else ids.ne(1)
            scores = scores.masked_fill(~(before & shown[:, None]), -1e4)
        if self.mask == "beside a sink":
            scores = torch.cat([scores, self.sink.repeat(1, ids.shape[1], 1)], -1).softmax(-1)[..., :-1]
        else:
            scores = scores.softmax(-1)
        return self.pool(x + scores @ v, ids, mask)

    def hide(self, mask):
        if self.mask.startswith("filled") or self.mask == "made of ids":
            return 0.0
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
        if self.mask == "repeated":
            return (1 - mask[:, None].repeat(1, mask.shape[1], 1).float()) * -1e4
        if self.mask == "expanded":
            hidden = 1 - mask[:, None].expand(1, mask.shape[1], mask.shape[1]).float()
            return hidden.masked_fill(hidden.bool(), torch.finfo(torch.float32).min)
        return (1 - mask[:, None].float()) * -1e4

    def pool(self, x, ids, mask):
        last = mask.sum(1) - 1
        if self.pooling == "indexed":
            return x[torch.arange(1), last]
        if self.pooling == "clamped":
            return x[torch.arange(1), last.clamp(min=0)]
        if self.pooling == "rows":
            return x[:, last]
        if self.pooling == "gathered":
            return x.gather(1, last[:, None, None].long().expand(1, 1, WIDTH))[:, 0]
        if self.pooling == "counted ids":
            return x[torch.arange(1), ids.ne(0).sum(1) - 1]
        if self.pooling == "mean":
            return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return x


def turn(x):
    """Rotate halves of a value by angles that are computed from positions."""
    angles = torch.arange(x.shape[1]).float()[:, None] * 50 ** (-torch.arange(0, WIDTH, 2).float() / WIDTH)[None]
    angles = torch.cat([angles, angles], -1)
    turned = torch.cat([-x[..., WIDTH // 2:], x[..., :WIDTH // 2]], -1)
    return x * angles.cos() + turned * angles.sin()


def save_encoder(path, convert, module, target=ct.target.iOS17):
    length = ct.RangeDim(1, MOST, 7)
    with torch.no_grad():
        traced = torch.jit.trace(module, (torch.ones(1, 7, dtype=torch.int32),) * 2, check_trace=False)
    convert(traced, inputs=[ct.TensorType(name, (1, length), dtype=np.int32) for name in ("ids", "mask")],
            outputs=[ct.TensorType("out")], skip_model_load=True, minimum_deployment_target=target).save(str(path))
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("convert", [ct.convert, ane.convert], ids=["ct", "ane"])
@pytest.mark.parametrize(("mask", "pooling"), [
    ("triangle", "tokens"), ("read by index", "tokens"), ("causal", "tokens"), ("causal", "indexed"),
    ("infinite", "mean"), ("infinite", "tokens"), ("padding", "indexed"), ("padding", "rows"), ("padding", "gathered"),
    ("padding", "counted ids"), ("padding", "clamped"), ("filled", "tokens"), ("repeated", "tokens"),
    ("filled and turned", "tokens"),
    ("expanded", "tokens"), ("beside a sink", "tokens")])
def test_forms_of_masks_and_poolings(tmp_path, mask, pooling, convert):
    if (mask, convert) == ("expanded", ct.convert):
        pytest.skip("coremltools alone does not convert it")
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


@pytest.mark.parametrize("mask", ["padding", "causal"])
def test_a_source_for_ios15_keeps_inputs_of_fp32(tmp_path, mask):
    torch.manual_seed(0)
    module = Encoder(mask, "tokens").eval()
    source = save_encoder(tmp_path / "source.mlpackage", ane.convert, module, ct.target.iOS15)
    assert ane.adapt(source, tmp_path / "out").status == "written"
    ids, flags = np.full((1, 6), 7, np.int32), np.ones((1, 6), np.int32)
    expected = module(torch.from_numpy(ids), torch.from_numpy(flags)).detach().numpy()
    np.testing.assert_allclose(run_packages(tmp_path / "out", ids, flags)[:, :6], expected, atol=5e-3)
    lookups = json.loads((tmp_path / "out" / "manifest.json").read_text())["lookups"]
    assert {each["dtype"] for each in lookups.values()} == {"float32"}


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


@pytest.mark.parametrize("edits", [{"add_masks": True, "fix_shape": {"ids": (1, 9), "mask": (1, 9)}},
                                   {"pad_shape": {"ids": (1, MOST), "mask": (1, MOST)}}], ids=str)
def test_edits_of_masks_are_compared_where_each_query_sees_a_key(tmp_path, edits):
    """Random masks hide the first token, which is the only one that it sees in a causal model."""
    torch.manual_seed(0)
    source = save_encoder(tmp_path / "source.mlpackage", ane.convert, Encoder("filled", "tokens").eval())
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, **edits)
    assert report.status == "written" and "mask: hide the last keys; with random masks" in str(report), str(report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("mask", ["filled", "made of ids"])
def test_a_wrong_edit_of_masks_is_found(tmp_path, monkeypatch, mask, size):
    """Without masks: those of an input, and those of padding among many ids."""
    from mil_ane_passes.transforms import encoder

    torch.manual_seed(0)
    source = save_encoder(tmp_path / "source.mlpackage", ane.convert, Encoder(mask, "tokens").eval())
    edits = {"add_masks": True, "fix_shape": {"ids": (1, size), "mask": (1, size)}}
    assert ane.edit(source, tmp_path / "out.mlpackage", verify=True, **edits).status == "written"
    monkeypatch.setattr(encoder, "MASKED", 0.0)
    report = ane.edit(source, tmp_path / "wrong.mlpackage", verify=True, **edits)
    assert report.status == "rejected", str(report)
    if size == 9 and mask == "filled":
        assert ane.adapt(source, tmp_path / "folder").status == "rejected"
