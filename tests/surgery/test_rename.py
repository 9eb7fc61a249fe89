"""`edit --rename`: other names, nothing else."""

from __future__ import annotations

import mil_ane_passes as ane
from tests.package.helpers import conv_program, make
from tests.surgery.helpers import ONLY_MODEL, changed_files, changed_ops, host_takes, same_outputs


def test_interface_and_inner_values_are_renamed_and_nothing_else(tmp_path):
    source, target = make(tmp_path / "in.mlpackage", conv_program()), tmp_path / "out.mlpackage"
    names = {"x": "image", "out": "probabilities", "relu": "activation"}
    report = ane.edit(source, target, rename=names)
    assert report.status == "written" and report.exact
    assert changed_files(source, target) == ONLY_MODEL
    assert changed_ops(source, target) == {"conv", "relu", "activation", "flat", "out", "probabilities"}
    model = host_takes(target)
    assert [each.name for each in model.get_spec().description.input] == ["image"]
    assert [each.name for each in model.get_spec().description.output] == ["probabilities"]
    same_outputs(source, target, names)
