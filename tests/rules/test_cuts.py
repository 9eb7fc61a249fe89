"""The cuts that notes name are cuts that `edit --split-at` makes."""

from __future__ import annotations

import re
import shlex

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.engine import find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.runtime import Runtime


class Doubling(torch.nn.Module):
    """A loop that values end, between layers supported on the ANE."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        while bool(x.abs().sum() < 100):
            x = x * 2
        return self.last(x)


@pytest.fixture(scope="module")
def looped(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuts") / "m.mlpackage"
    ct.convert(torch.jit.script(Doubling().eval()), inputs=[ct.TensorType(name="x", shape=(2, 8))],
               minimum_deployment_target=ct.target.iOS17, skip_model_load=True).save(str(path))
    return path


def places(path, rule):
    notes = [hit.reason for hit in find_matches(get_all_rules()[rule].configured(), ane.load(path).program).fired]
    (note,) = [note for note in notes if "--split-at" in note]
    return re.findall(r"(before|after) it at '([^']+)'", note)


def test_a_loop_is_cut_out_by_the_two_commands(looped, tmp_path, capsys):
    (_, before), (_, behind) = places(looped, "control_flow")
    for source, name, value in ((looped, "a", behind), (tmp_path / "a_1.mlpackage", "b", before)):
        assert main(["edit", str(source), "-o", str(tmp_path / f"{name}.mlpackage"), "--split-at", value]) == 0
    capsys.readouterr()
    parts = [ane.load(tmp_path / name).program for name in ("b_1.mlpackage", "b_2.mlpackage", "a_2.mlpackage")]
    kinds = [{op.op_type for op in part.functions["main"].operations} for part in parts]
    assert ["while_loop" in kind for kind in kinds] == [False, True, False] and "linear" in kinds[0] & kinds[2]
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    (truth,) = Runtime(ane.load(looped).program, precision="float16")({"x": x}).values()
    values = {"x": x}
    for part in parts:
        values |= Runtime(part, precision="float16")({name: values[name] for name in part.functions["main"].inputs})
    np.testing.assert_array_equal(list(values.values())[-1], truth)


def test_what_stands_at_the_edge_is_cut_on_one_side():
    found = find_matches(get_all_rules()["data_dependent_shape"].configured(),
                         build_program(lambda x: mb.non_zero(x=mb.relu(x=x, name="a"), name="y"), x=(2, 3)))
    assert found.fired[0].reason.endswith("; to split it off with --split-at: before it at 'a'")
    alone = find_matches(get_all_rules()["data_dependent_shape"].configured(),
                         build_program(lambda x: mb.non_zero(x=x, name="y"), x=(2, 3)))
    assert alone.fired[0].reason.endswith("one row per nonzero element")


def test_lint_prints_the_commands_that_cut_a_loop_out(looped, tmp_path, monkeypatch, capsys):
    text = str(ane.lint(looped, target="m4"))
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall("(?:fix|or): (mil-ane-passes edit .*)", text)
    for step in command.split(" && "):
        assert main(shlex.split(step)[1:]) == 0
    capsys.readouterr()
    kinds = [{op.op_type for op in ane.load(name).program.functions["main"].operations}
             for name in ("OUT_1_1.mlpackage", "OUT_1_2.mlpackage", "OUT_2.mlpackage")]
    assert ["while_loop" in kind for kind in kinds] == [False, True, False]


@pytest.mark.parametrize("renamed", [False, True])
def test_functions_with_the_same_cuts_are_cut_by_one_command(looped, renamed, tmp_path, monkeypatch, capsys):
    functions = ct.utils.MultiFunctionDescriptor()
    for name in ("one", "two"):
        functions.add_function(str(looped), "main", name)
    functions.default_function_name = "one"
    ct.utils.save_multifunction(functions, str(tmp_path / "both.mlpackage"))
    monkeypatch.chdir(tmp_path)
    if renamed:
        (_, value), _ = places(looped, "control_flow")
        ane.edit("both.mlpackage", "other.mlpackage", rename={value: "elsewhere"}, function="two")
    text = str(ane.lint("other.mlpackage" if renamed else "both.mlpackage", target="m4"))
    commands = re.findall("(?:fix|or): (mil-ane-passes edit .*)", text)
    assert len(commands) == 1 + renamed
    kept = set(re.findall(r"--function (\w+)", commands[0])) or {"one", "two"}  # functions are listed in any order
    assert len(kept) == (1 if renamed else 2)
    for step in commands[0].split(" && "):
        assert main(shlex.split(step)[1:]) == 0
    said = capsys.readouterr().out
    assert all((f"functions of IN that are left out of both parts: {name}" in said) == (name not in kept)
               for name in ("one", "two"))
    assert set(ane.load("OUT_1_2.mlpackage").functions) == kept


@pytest.mark.parametrize("rule", ["custom_layer", "control_flow", "data_dependent_shape", "runtime_gather"])
def test_the_advice_names_the_option(rule):
    assert "edit --split-at" in get_all_rules()[rule].advice
