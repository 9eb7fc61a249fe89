"""Suggestions of names in errors: near spellings only."""

from __future__ import annotations

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.utils.errors import suggest_nearest


@pytest.mark.parametrize(("name", "known", "found"), [
    ("tile_atention", ["tile_attention", "decompose_attention"], "tile_attention"),
    ("Linear_1", ["linear_0_bias", "linear_1"], "linear_1"), ("logits", ["Logits"], "Logits"),
    ("mad", ["mid", "out"], "mid"), ("relv", ["relu"], "relu"), ("m44", ["m4", "m3"], "m4"),
    ("cast", ["int_casts"], None), ("gelu", ["stable_gelu_tail"], None), ("m7", ["m6"], None), ("x", ["y"], None),
    ("layer_norm", ["scaled_rms_norm"], None), ("", ["a"], None),
])
def test_only_near_spellings_are_suggested(name, known, found):
    assert suggest_nearest(name, known) == (f"; did you mean '{found}'?" if found else "")


@pytest.mark.parametrize("name", ["softmax", "cast", "layer_norm", "fuse_bn", "conv_bias", "remove_transpose"])
def test_passes_that_are_called_otherwise_are_not_suggested(name):
    with pytest.raises(ane.InputError, match=f"no pass '{name}'") as error:
        ane.pipeline(passes=name)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(("option", "found"), [
    ("--taget", "--target"), ("--faill-on", "--fail-on"), ("--LINK", None), ("--chip", None), ("--device", None),
    ("--check", None), ("--tolerance", None),
])
def test_only_near_options_are_suggested(capsys, option, found):
    with pytest.raises(SystemExit) as exit_:
        raise SystemExit(main(["lint", "in.mlpackage", option, "x"]))
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and (f"did you mean '{found}'?" in said if found else "did you mean" not in said), said
