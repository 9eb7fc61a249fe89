"""`verify` with a published fault in the second package: does it hit, where, and does the rewrite fix it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mil_ane_passes import load, rewrite, save
from mil_ane_passes.commands.main import main
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.runtime import QUIRKS

QUIRK = "conv_transpose_1d_bias"


@pytest.fixture
def source(fixtures):
    return str(fixtures / "conv_transpose_1d.mlpackage")


def test_a_package_with_itself_shows_that_the_fault_hits(source, capsys):
    assert main(["verify", source, source, "--quirk", QUIRK]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"different, judged as rounding (6 runs at float64), with {QUIRK} in the second\n")
    struck = next(op for _, op in iterate_ops(load(source).program) if op.op_type == "conv_transpose")
    assert f"first difference: %{struck.outputs[0].name} (conv_transpose) in main; seed 0, float64" in text


def test_its_rewrite_shows_that_it_is_cured(source, tmp_path, capsys):
    rewrite(source, tmp_path / "out.mlpackage")
    assert main(["verify", source, str(tmp_path / "out.mlpackage"), "--quirk", QUIRK]) == 0
    assert capsys.readouterr().out == (
        f"equal in 6 runs at float64, bit for bit, with {QUIRK} in the second\n"
        "  sampled: normal draws, wide range, NaN and infinities, ties\n")


def test_the_fault_is_in_the_second_only(source, tmp_path, capsys):
    rewrite(source, tmp_path / "out.mlpackage")
    assert main(["verify", str(tmp_path / "out.mlpackage"), source, "--quirk", QUIRK]) == 1


def test_several_faults_as_data(source, capsys):
    names = [QUIRK, "asymmetric_conv_transpose_pad"]
    assert main(["verify", source, source, "--format", "json", "--quirk", names[0], "--quirk", names[1]]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["quirks"] == names and data["status"] == "different" and data["schema"] == 1
    assert data["first_difference"]["after"]["op_type"] == "conv_transpose"
    assert data["first_difference"]["operands"]["unknown"] == []


def test_a_fault_that_is_not_known(source, capsys):
    assert main(["verify", source, source, "--quirk", "conv_transpose_bias"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"mil-ane-passes: quirk 'conv_transpose_bias': unknown; did you mean '{QUIRK}'? (known: ")
    assert all(name in line for name in QUIRKS)


@pytest.mark.parametrize("command", ["verify", "run"])
def test_help_lists_them_with_a_line_each(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and len(QUIRKS) >= 3
    for name, quirk in QUIRKS.items():
        assert f" {name} {' '.join(quirk.summary().split())}" in text


def test_a_wrong_usage_does_not_list_them(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "a", "b", "--exactness", "close"])
    assert QUIRK not in capsys.readouterr().err


def test_the_first_op_that_differs_in_a_package(source, tmp_path, capsys):
    """A weight is changed in the middle of a package."""
    package = load(source)
    op = [op for _, op in iterate_ops(package.program) if op.op_type == "conv_transpose"][-1]
    held = op.bias.op.outputs[0]
    held._sym_val.val = (np.asarray(held.val) + 1).astype(np.float16)
    save(package, tmp_path / "changed.mlpackage")
    assert main(["verify", source, str(tmp_path / "changed.mlpackage")]) == 1
    text = capsys.readouterr().out
    assert f"first difference: %{op.outputs[0].name} (conv_transpose) in main" in text
    assert "constants that differ: bias" in text
