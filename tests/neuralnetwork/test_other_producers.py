"""Networks that onnx-coreml wrote, against PyTorch: classic layers (iOS 12) and those of Core ML 3 (iOS 13)."""

from __future__ import annotations

from pathlib import Path

import coremltools as ct
import numpy as np
import pytest

import mil_ane_passes as ane

FOLDER = Path(__file__).parents[2] / "fixtures" / "onnx_coreml"
FILES = sorted(path.name for path in FOLDER.glob("*.mlmodel"))


def test_every_graph_is_there_in_both_forms():
    titles = {name.rsplit("_", 1)[0] for name in FILES}
    both = {f"{title}_{form}.mlmodel" for title in titles for form in ("ios12", "ios13")}
    assert len(titles) >= 9 and both == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_upgraded_network_computes_what_pytorch_does(name, tmp_path):
    expected = np.load(FOLDER / "expected.npz")
    title = name.rsplit("_", 1)[0]
    ane.upgrade(FOLDER / name, tmp_path / "out.mlpackage", precision="fp32")
    (feature,) = ct.utils.load_spec(str(FOLDER / name)).description.input
    x = expected[f"{title} x"].reshape(feature.type.multiArrayType.shape)
    for precision, bound in (("float64", 1e-5), ("float32", 2e-5)):
        (y,) = ane.run(tmp_path / "out.mlpackage", {feature.name: x}, precision=precision).values()
        true = expected[f"{title} y"]
        np.testing.assert_allclose(y.ravel(), true.ravel(), rtol=0, atol=bound * np.abs(true).max())


@pytest.mark.parametrize("name", [name for name in FILES if "ios13" in name])
def test_rewriting_within_the_format_keeps_what_it_computes(name, tmp_path):
    """`rewrite` compares both networks; here the result stands against PyTorch as well."""
    expected = np.load(FOLDER / "expected.npz")
    title, out = name.rsplit("_", 1)[0], tmp_path / "out.mlmodel"
    assert ane.rewrite(FOLDER / name, out, preset="full").status in ("written", "unchanged")
    (feature,) = ct.utils.load_spec(str(out)).description.input
    x = expected[f"{title} x"].reshape(feature.type.multiArrayType.shape)
    (y,) = ane.run(out, {feature.name: x}, precision="float64").values()
    true = expected[f"{title} y"]
    np.testing.assert_allclose(y.ravel(), true.ravel(), rtol=0, atol=2e-3 * np.abs(true).max())  # run at fp16
