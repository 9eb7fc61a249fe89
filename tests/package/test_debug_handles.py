"""ExecuTorch's mapping from debug handles to ops follows the ops of a package that changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.package import load, save

from .helpers import main_block, make, normal, spec_of, tree

FILE = "executorch_debug_handle_mapping.json"


@pytest.fixture
def source(tmp_path) -> Path:
    """A package as ExecuTorch's Core ML backend saves it: a conv has handle 1, a conv_transpose 2, the rest none."""
    weight, up = normal(16, 16, 3), normal(16, 4, 3)

    @mb.program(input_specs=[mb.TensorSpec((1, 16, 64))])
    def program(x):
        y = mb.conv(x=x, weight=weight, pad_type="same", name="conv")
        y = mb.conv_transpose(x=y, weight=up, bias=np.ones(4, np.float32), name="up")
        return mb.relu(x=y, name="out")

    path = make(tmp_path / "source.mlpackage", program, pass_pipeline=ct.PassPipeline.EMPTY)
    ops = main_block(spec_of(path)).operations
    mapping = {"1": [format_path("const", "conv_weight_0"), format_path("conv", "conv")],
               "2": [format_path("conv_transpose", "up")]}
    names = {op.outputs[0].name for op in ops}
    assert {"conv_weight_0", "conv", "up"} <= names, names
    (path / FILE).write_text(json.dumps({"version": "9.0", "mapping": mapping}))
    return path


def format_path(op_type: str, output: str) -> list[dict[str, str]]:
    return [{"Type": "Program"}, {"Type": "Function", "Name": "main"}, {"Type": "Block"},
            {"Type": "Operation", "Operator": op_type, "Output": output}]


def read_handles(package: Path) -> dict[tuple[str, str], str]:
    """The handle of each op type and output name."""
    found = json.loads((package / FILE).read_text())
    assert found["version"] == "9.0"
    return {(path[-1]["Operator"], path[-1]["Output"]): handle
            for handle, paths in found["mapping"].items() for path in paths}


def list_ops(package: Path) -> set[tuple[str, str]]:
    return {(op.type, op.outputs[0].name) for op in main_block(spec_of(package)).operations}


def test_ops_that_replace_an_op_have_its_handle(source, tmp_path):
    target = tmp_path / "rewritten.mlpackage"
    ane.rewrite(source, target, passes=["split_conv_transpose_bias"])
    handles = read_handles(target)
    assert set(handles) <= list_ops(target), "it names ops that are there"
    assert handles["conv", "conv"] == handles["const", "conv_weight_0"] == "1"
    new = list_ops(target) - list_ops(source)
    assert len(new) >= 2 and {handles[op] for op in new if op in handles} == {"2"}
    assert {op for op in new if op[0] != "const"} <= set(handles)
    assert all(output != "out" for _, output in handles), "what had none has none"


def test_names_follow_an_edit(source, tmp_path):
    before = json.loads((source / FILE).read_text())
    before["mapping"]["3"] = [format_path("relu", "out")]
    (source / FILE).write_text(json.dumps(before))
    target = tmp_path / "edited.mlpackage"
    ane.edit(source, target, rename={"out": "logits"})
    assert read_handles(target)["relu", "logits"] == "3"
    assert set(read_handles(target)) <= list_ops(target)


def test_a_package_that_does_not_change_keeps_its_bytes(source, tmp_path):
    (source / FILE).write_text((source / FILE).read_text() + "\n")
    save(load(source), tmp_path / "saved.mlpackage")
    assert tree(tmp_path / "saved.mlpackage") == tree(source)


@pytest.mark.parametrize("content", [
    b"\xff", b"{", b"[]", b"{}", b'{"mapping": []}', b'{"mapping": {"x": []}}', b'{"mapping": {"1": {}}}',
    b'{"mapping": {"1": [[]]}}', b'{"mapping": {"1": [[{"Type": "Operation"}]]}}', b'{"mapping": {"1": [["conv"]]}}',
    b"[" * 100_000], ids=range(11))
def test_a_file_of_another_form_stays_as_it_is(content, source, tmp_path):
    (source / FILE).write_bytes(content)
    target = tmp_path / "rewritten.mlpackage"
    report: Any = ane.rewrite(source, target, passes=["split_conv_transpose_bias"])
    assert report.status == "written" and (target / FILE).read_bytes() == content


def test_a_package_without_the_file_gets_none(source, tmp_path):
    (source / FILE).unlink()
    ane.rewrite(source, tmp_path / "rewritten.mlpackage", passes=["split_conv_transpose_bias"])
    assert not (tmp_path / "rewritten.mlpackage" / FILE).exists()
