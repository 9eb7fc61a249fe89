"""The packages in fixtures/ through the main job: nothing to do, one that we made, one that nobody here made."""

from __future__ import annotations

import filecmp
from pathlib import Path

import numpy as np
import pytest

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops

FIXTURES = Path(__file__).parent.parent / "fixtures"
MADE_HERE = FIXTURES / "conv_transpose_1d.mlpackage"
TRAINED = FIXTURES / "nmp.mlpackage"


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def assert_same_bytes(one, other):
    assert files(one) == files(other)
    different = filecmp.cmpfiles(one, other, files(one), shallow=False)[1:]
    assert different == ([], [])


@pytest.mark.parametrize("name, preset", [("nothing_to_do", "full"), ("nmp", "safe")])
def test_where_no_rule_fires_the_package_comes_back_byte_for_byte(name, preset, tmp_path):
    source, target = FIXTURES / f"{name}.mlpackage", tmp_path / "out.mlpackage"
    report = ane.rewrite(source, target, preset=preset)
    assert report.status == "unchanged" and report.verified
    assert_same_bytes(source, target)


@pytest.mark.parametrize("preset", ["safe", "full"])
def test_rewriting_twice_equals_once(preset, tmp_path):
    once, twice = tmp_path / "once.mlpackage", tmp_path / "twice.mlpackage"
    assert ane.rewrite(MADE_HERE, once, preset=preset).status == "written"
    assert ane.rewrite(once, twice, preset=preset).status == "unchanged"
    assert_same_bytes(once, twice)


def test_names_description_and_weights_are_kept(tmp_path):
    target = tmp_path / "out.mlpackage"
    ane.rewrite(MADE_HERE, target)
    before, after = ane.load(MADE_HERE), ane.load(target)
    assert after.spec.description == before.spec.description
    assert after.spec.description.metadata.userDefined
    names = [{var.name for _, op in iterate_ops(each.program) if op.op_type != "const" for var in op.outputs}
             for each in (before, after)]
    assert names[0] <= names[1]
    weights = "Data/com.apple.CoreML/weights/weight.bin"
    assert (target / weights).read_bytes() == (MADE_HERE / weights).read_bytes()


def test_a_trained_package_is_proved_with_every_1d_conv_lifted(tmp_path):
    report = ane.rewrite(TRAINED, tmp_path / "out.mlpackage", preset="full", max_growth=None)
    assert report.status == "written" and report.verify.equal_bits
    convs = [op for _, op in iterate_ops(report.package.program) if op.op_type == "conv"]
    assert len(convs) == 32 and all(op.x.rank == 4 for op in convs)
    assert report.weight_bytes_before == report.weight_bytes_after


def test_the_rewritten_package_computes_what_pytorch_computed(tmp_path):
    """The golden is PyTorch's float32 output; the package stores fp16 weights. Each of the three layers rounds its
    weights and, in a float32 run, nothing else, so the error is a few times 2**-11 of the output's scale (tanh: 1)."""
    target = tmp_path / "out.mlpackage"
    ane.rewrite(MADE_HERE, target, preset="full")
    golden = np.load(FIXTURES / "conv_transpose_1d.npz")
    found = ane.run(target, {"mel": golden["mel"]})["waveform"]
    assert np.abs(found - golden["waveform"]).max() <= 4 * 2.0**-11
    unrewritten = ane.run(MADE_HERE, {"mel": golden["mel"]})["waveform"]
    assert np.array_equal(found, unrewritten)
