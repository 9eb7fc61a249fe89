"""The folder that goes to a Mac, and the script in it, run here against stand-ins of what only a Mac has."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.models import compute_plan

import mil_ane_passes as ane
from mil_ane_passes.commands.mac_folder import stage_folder
from mil_ane_passes.commands.main import main
from tests.conversions import save_program
from tests.package.helpers import with_functions

from .fake_coremltools import fake_mac, measured, script

QUIRK = "conv_transpose_1d_bias"


@pytest.fixture
def source(fixtures):
    return str(fixtures / "conv_transpose_1d.mlpackage")


def written(tmp_path, capsys, *arguments):
    assert main(["mac-script", str(tmp_path / "mac"), *arguments, "--format", "json"]) == 0
    return tmp_path / "mac", json.loads(capsys.readouterr().out)


def saved(path, program, target=ct.target.iOS18):
    save_program(program, path, target)
    return str(path)


def everywhere(function, op):
    return ("cpu", "gpu", "ane"), "ane", 0.5


def verdicts(result):
    return {(line["package"], line["units"]): line["passed"] for line in result["verdict"]}


def test_a_folder_that_begins_with_a_dash_is_no_option_of_the_printed_command(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["mac-script", "--seeds", "1", "--", "-mac", source]) == 0
    assert capsys.readouterr().out.endswith("then here: mil-ane-passes calibrate-plan ./-mac/result.json\n")


def test_the_stand_ins_have_the_signatures_of_coremltools(monkeypatch):
    real = {"MLModel": ct.models.MLModel, "MLComputePlan": compute_plan.MLComputePlan}
    for (name, original), fake in zip(real.items(), fake_mac(monkeypatch)):
        for method, function in vars(fake).items():
            if inspect.isfunction(function) and hasattr(original, method):
                expected = list(inspect.signature(getattr(original, method)).parameters)
                assert list(inspect.signature(function).parameters) == expected, (name, method)
        used = ["load_from_path"] if name == "MLComputePlan" else ["predict", "make_state", "get_compiled_model_path"]
        assert all(list(inspect.signature(getattr(fake, each)).parameters)
                   == list(inspect.signature(getattr(original, each)).parameters) for each in used)
    assert isinstance(inspect.getattr_static(real["MLComputePlan"], "model_structure"), property)


def test_a_wrong_layer_is_wrong_before_and_right_after(source, tmp_path, capsys, monkeypatch):
    """CPU_ONLY is right, ALL is wrong where the bias fault is, and the rewritten package is right everywhere."""
    folder, told = written(tmp_path, capsys, source, "--preset", "safe")
    assert told["packages"] == ["before.mlpackage", "after.mlpackage"] and told["feeds"] == told["expected"] == 6
    fake_mac(monkeypatch, quirks=(QUIRK,), answer=everywhere)
    result = measured(folder)
    assert result["complete"] and result["problems"] == [] and result["doing"] == ""
    assert verdicts(result) == {
        ("before", "CPU_ONLY"): True, ("before", "CPU_AND_NE"): False, ("before", "ALL"): False,
        ("after", "CPU_ONLY"): True, ("after", "CPU_AND_NE"): True, ("after", "ALL"): True}
    wrong = next(line["says"] for line in result["verdict"] if line["passed"] is False)
    assert " on seed 0 against expected: off by " in wrong and " against CPU_ONLY: off by " in wrong
    assert result["machine"]["chip"] == "Apple M4" and result["machine"]["macos"] == "26.1"
    feeds = result["packages"]["after"]["functions"]["main"]["units"]["ALL"]["feeds"]
    assert list(feeds) == ["seed 0", "seed 1", "seed 2"]
    assert {row["against"] for row in feeds["seed 0"]} == {"expected", "expected of before", "CPU_ONLY"}
    timing = result["packages"]["before"]["functions"]["main"]["units"]["ALL"]["timing"]
    assert timing["runs"] == 2 and 0 < timing["min_ms"] <= timing["median_ms"]


def test_the_compute_plan_lists_every_op_but_constants(source, tmp_path, capsys, monkeypatch):
    folder, _ = written(tmp_path, capsys, source, "--seeds", "1")
    fake_mac(monkeypatch, answer=everywhere)
    plans = measured(folder)["packages"]["before"]["plans"]
    assert list(plans) == ["CPU_AND_NE", "ALL"]
    rows = plans["ALL"]["program"]["functions"]["main"]
    ops = [op for op in ane.load(source).program.functions["main"].operations if op.op_type != "const"]
    assert [row["operator"] for row in rows] == [f"ios17.{op.op_type}" for op in ops]
    assert [row["outputs"] for row in rows] == [[var.name for var in op.outputs] for op in ops]
    assert rows[0] == dict(rows[0], preferred="ane", supported=["cpu", "gpu", "ane"], cost=0.5, depth=0)


@pytest.mark.parametrize("said, kept", [
    (None, (None, None, None)),
    ((("cpu",), "cpu", float("nan")), (["cpu"], "cpu", None)),
    ((("cpu",), None, 0.25), (["cpu"], None, 0.25)),
])
def test_what_core_ml_does_not_say_is_null(source, tmp_path, capsys, monkeypatch, said, kept):
    folder, _ = written(tmp_path, capsys, source, "--seeds", "1")
    fake_mac(monkeypatch, answer=lambda function, op: said)
    row = measured(folder)["packages"]["before"]["plans"]["ALL"]["program"]["functions"]["main"][0]
    assert (row["supported"], row["preferred"], row["cost"]) == kept


def test_the_script_needs_little():
    """Python 3.9's syntax, and nothing but coremltools, numpy and, for images, Pillow."""
    text = (Path(ane.__file__).parent / "report/mac/measure.py").read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    named = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    named |= {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
              for alias in node.names}
    assert named - set(sys.stdlib_module_names) == {"coremltools", "numpy", "PIL"}


@pytest.mark.skipif(sys.platform == "darwin", reason="needs a system other than macOS")
def test_the_script_measures_on_macos_only(source, tmp_path, capsys):
    folder, _ = written(tmp_path, capsys, source)
    done = subprocess.run([sys.executable, str(folder / "measure.py")], capture_output=True, text=True)
    assert done.returncode == 1 and "expected macOS" in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / "result.json").exists()


def test_numbers_that_differ_are_described(source, tmp_path, capsys):
    folder, _ = written(tmp_path, capsys, source, "--seeds", "1")
    compare = script(folder)["compare_arrays"]
    found = compare(np.array([1.0, -4.0, np.nan, np.inf]), np.array([1.0, -3.0, np.nan, np.inf]), 0.1)
    assert (found["passed"], found["max_abs"], found["worst_at"], found["beyond"]) == (False, 1.0, [1], 1)
    assert (found["allowed"], found["max_rel"], found["nan"], found["reference_inf"]) == (0.4, 0.25, 1, 1)
    assert compare(np.array([1.0, 2.0]), np.array([1.0, np.nan]), 1.0)["max_abs"] == np.inf
    assert compare(np.array([1, 2]), np.array([1, 3]), 1.0)["passed"] is False
    assert compare(np.zeros((2, 3)), np.zeros((3, 2)), 1.0)["problem"] == "shape [3, 2], expected [2, 3]"
    assert compare(np.array(["a"]), np.array(["b"]), 1.0)["passed"] is False
    assert compare(np.zeros((0, 2)), np.zeros((0, 2)), 0.0)["passed"] is True
    flat = script(folder)["flatten_outputs"]({"p": {"b": 0.1, "a": 0.9}, "label": "a"})
    assert flat["p"].tolist() == [0.9, 0.1] and flat["p labels"].tolist() == ["a", "b"] and flat["label"] == "a"


def test_what_fails_is_told_and_the_rest_goes_on(source, tmp_path, capsys, monkeypatch):
    folder, _ = written(tmp_path, capsys, source, "--seeds", "1")
    fake_mac(monkeypatch, answer=everywhere, broken=("ALL",), facts={"hw.model": "Mac16,12"})
    result = measured(folder)
    assert result["complete"] and result["machine"]["model"] == "Mac16,12" and result["machine"]["chip"] is None
    assert verdicts(result) == {("before", "CPU_ONLY"): True, ("before", "CPU_AND_NE"): True}
    said = {each["where"]: each["problem"] for each in result["problems"]}
    assert said["load before, main, ALL"] == "RuntimeError: Error compiling model for ALL"
    assert said["compute plan of before, ALL"] == said["load before, main, ALL"]
    assert said["sw_vers -productVersion"] == "FileNotFoundError: sw_vers"


def test_on_this_machine_the_script_says_what_it_lacks(source, tmp_path, capsys):
    """No stand-ins: every step fails, and the result says so."""
    folder, _ = written(tmp_path, capsys, source, "--seeds", "1")
    result = measured(folder)
    assert result["complete"] and result["packages"]["before"]["plans"] == {}
    assert any("Core" in each["problem"] for each in result["problems"])
    assert [line["passed"] for line in result["verdict"]] == [None] * 3


def test_a_users_own_feeds(source, fixtures, tmp_path, capsys):
    with np.load(fixtures / "conv_transpose_1d.npz") as arrays:
        given = {"mel": arrays["mel"]}
    np.savez(tmp_path / "feeds.npz", **given)
    folder, told = written(tmp_path, capsys, source, "--feeds", str(tmp_path / "feeds.npz"))
    assert told["feeds"] == 1
    with np.load(folder / "feeds/000.npz") as kept:
        assert kept.files == ["mel"] and np.allclose(given["mel"], kept["mel"], rtol=1e-3, atol=1e-3)


def two_functions_with_a_state(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=types.fp16), mb.StateTensorSpec((2, 3), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def main_one(x, held):
        return mb.add(x=mb.read_state(input=held), y=x, name="y")

    @mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def other(x):
        return mb.relu(x=x, name="z")

    parts = {name: saved(tmp_path / f"{name}.mlpackage", made) for name, made in (("main", main_one), ("other", other))}
    return str(with_functions(tmp_path / "in.mlpackage", parts, "main"))


def test_states_and_several_functions(tmp_path, capsys, monkeypatch):
    package = two_functions_with_a_state(tmp_path)
    folder, _ = written(tmp_path, capsys, package, "--seeds", "2")
    fake_mac(monkeypatch, answer=everywhere)
    result = measured(folder)
    assert result["problems"] == []
    assert [line["passed"] for line in result["verdict"]] == [True] * 6
    rows = result["packages"]["before"]["functions"]["main"]["units"]["ALL"]["feeds"]["seed 0"]
    assert {row["output"] for row in rows} == {"y", "state held"}
    assert set(result["packages"]["before"]["plans"]["ALL"]["program"]["functions"]) == {"main", "other"}


def test_images_go_as_pixels(tmp_path, capsys, monkeypatch):
    pytest.importorskip("PIL")
    import torch

    class Brighter(torch.nn.Module):
        def forward(self, image):
            return image * 0.5

    traced = torch.jit.trace(Brighter().eval(), torch.zeros(1, 3, 8, 6))
    path = str(tmp_path / "in.mlpackage")
    ct.convert(traced, inputs=[ct.ImageType(name="image", shape=(1, 3, 8, 6), color_layout=ct.colorlayout.BGR)],
               outputs=[ct.ImageType(name="half", color_layout=ct.colorlayout.BGR)], skip_model_load=True,
               minimum_deployment_target=ct.target.iOS16).save(path)
    folder, told = written(tmp_path, capsys, path, "--seeds", "1")
    assert "pillow" in told["run"]
    with np.load(folder / "feeds/000.npz") as kept:
        assert kept["image"].shape == (8, 6, 3) and kept["image"].dtype == np.uint8
    fake_mac(monkeypatch, answer=everywhere)
    result = measured(folder)
    assert result["problems"] == [] and all(line["passed"] for line in result["verdict"])


def test_nothing_to_rewrite_makes_no_second_package(fixtures, tmp_path, capsys):
    _, told = written(tmp_path, capsys, str(fixtures / "nothing_to_do.mlpackage"), "--preset", "safe")
    assert told["packages"] == ["before.mlpackage"] and "changes nothing" in told["notes"][0]


def test_passes_in_place_of_a_preset_are_noted(source, tmp_path, capsys):
    _, told = written(tmp_path, capsys, source, "--preset", "full", "--passes", "stable_softplus")
    assert told["notes"][0] == "--passes replaces --preset full; --passes full,... runs both"


def test_the_text_says_what_to_do(source, tmp_path, capsys):
    assert main(["mac-script", str(tmp_path / "mac"), source, source]) == 0
    text = capsys.readouterr().out
    assert "pip install coremltools==9.0; python measure.py" in text and "result.json" in text
    readme = (tmp_path / "mac/README.txt").read_text()
    assert "never ran it on one" in readme and "0.02 of an output's largest value" in readme
    assert "The authors of this script had no Mac" in (tmp_path / "mac/measure.py").read_text()
    assert "import mil_ane_passes" not in (tmp_path / "mac/measure.py").read_text()


@pytest.mark.parametrize("arguments, said", [
    (["missing/mac", "IN"], "missing/mac: the folder missing does not exist; create it first"),
    (["full", "IN"], "full: exists and is not an empty folder; expected a free path or an empty folder"),
    (["mac", "none.mlpackage"], "none.mlpackage"),
    (["mac", "IN", "IN", "--preset", "safe"], "both a second package and a rewrite"),
    (["mac", "IN", "--feeds", "none.npz"], "feeds: no file 'none.npz'"),
    (["mac", "IN", "--preset", "quick"], "quick"),
])
def test_bad_input_is_one_line_and_leaves_nothing(source, tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    assert main(["mac-script", *[source if each == "IN" else each for each in arguments]]) == 2
    line = capsys.readouterr().err
    assert line.startswith("mil-ane-passes: ") and said in line.replace(f"{tmp_path}/", "") and line.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_empty_folder_is_used(source, tmp_path, capsys):
    (tmp_path / "mac").mkdir()
    folder, _ = written(tmp_path, capsys, source, "--seeds", "1")
    assert (folder / "measure.py").is_file() and [path.name for path in tmp_path.iterdir()] == ["mac"]


def test_a_folder_that_another_program_fills_meanwhile_is_named(tmp_path):
    goal = tmp_path / "measure"
    with pytest.raises(ane.InputError, match="measure: is no longer an empty folder, as another program wrote to it"):
        with stage_folder(goal):
            goal.mkdir()
            (goal / "theirs").touch()
    assert [each.name for each in tmp_path.rglob("*")] == ["measure", "theirs"]
