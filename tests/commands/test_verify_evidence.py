"""Evidence of an equivalence check: what it records, and how somebody else repeats the check."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands import evidence as evidence_module
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program, make_weight
from tests.conversions import save_program


@pytest.fixture
def models(tmp_path):
    """A model, and one whose sum has its operands exchanged."""
    def build(exchange):
        def body(x):
            one, two = mb.exp(x=x), mb.matmul(x=x, y=make_weight(3, 3))
            return mb.relu(x=mb.add(x=two, y=one) if exchange else mb.add(x=one, y=two), name="y")

        return save_program(build_program(body, x=(2, 3)), tmp_path / f"{exchange}.mlpackage")

    return build(False), build(True)


@pytest.fixture
def evidence(models, tmp_path, capsys):
    path = tmp_path / "evidence.json"
    assert main(["verify", *models, "--seeds", "2", "--precision", "float16", "--report", str(path)]) == 0
    assert "repeated" not in capsys.readouterr().out
    return path


def test_it_records_models_options_runs_and_the_verdict(models, evidence):
    found = json.loads(evidence.read_text())
    assert (found["schema"], found["kind"]) == (1, "mil_ane_passes equivalence check")
    assert [found["models"][name]["path"] for name in ("before", "after")] == list(models)
    assert len({each["sha256"] for each in found["models"].values()}) == 2
    assert found["options"]["seeds"] == 2 and found["options"]["precision"] == "float16"
    assert found["report"]["status"] == "equal" and found["versions"]["numpy"] == np.__version__
    assert {(run["feeds"], run["precision"]) for run in found["runs"]} >= {
        (f"seed {number}", precision) for number in (0, 1) for precision in ("float64", "float16")}
    assert all(run["before"] == run["after"] and len(run["inputs"]) == 64 for run in found["runs"])
    assert len({(run["inputs"], run["precision"]) for run in found["runs"]}) == len(found["runs"])
    assert found["regions"] and all(set(each) == {
        "function", "value", "before", "precision", "runs", "equal_bits", "difference"} for each in found["regions"])


def test_the_check_is_repeated_with_its_options(models, evidence, capsys):
    assert main(["verify", "--replay", str(evidence)]) == 0
    count = len(json.loads(evidence.read_text())["runs"])
    assert (f"repeated: the recorded models, verdict and feeds; outputs had the same bits in {count} of {count} runs"
            in capsys.readouterr().out)
    report = ane.verify(replay=evidence)
    assert report.equal and report.departed == "" and report.repeated
    assert report.to_dict()["repeated"] == report.repeated


def test_models_may_have_moved(models, evidence, tmp_path, capsys):
    moved = [str(shutil.move(each, tmp_path / f"moved {number}.mlpackage")) for number, each in enumerate(models)]
    assert main(["verify", "--replay", str(evidence)]) == 2
    assert "False.mlpackage" in capsys.readouterr().err
    assert main(["verify", *moved, "--replay", str(evidence)]) == 0
    assert "repeated: the recorded models" in capsys.readouterr().out


def test_another_model_is_named(models, evidence, tmp_path, capsys):
    assert main(["verify", models[1], models[1], "--replay", str(evidence)]) == 1
    assert "not repeated: before is not the recorded model (its SHA-256 differs)" in capsys.readouterr().out


def test_another_verdict_and_other_feeds_are_named(evidence, capsys):
    found = json.loads(evidence.read_text())
    found["report"]["status"] = "different"
    found["runs"][0]["inputs"] = "0" * 64
    found["versions"]["torch"] = "1.0"
    evidence.write_text(json.dumps(found))
    assert main(["verify", "--replay", str(evidence)]) == 1
    said, count = capsys.readouterr().out, len(found["runs"])
    assert "not repeated: the verdict was 'different', now 'equal'" in said
    assert f"{count - 1} of {count} runs had the recorded feeds (torch 1.0 recorded, " in said


def test_other_bits_are_counted_but_decide_nothing(evidence):
    found = json.loads(evidence.read_text())
    found["runs"][0]["before"] = "0" * 64
    evidence.write_text(json.dumps(found))
    count = len(found["runs"])
    assert f"the same bits in {count - 1} of {count} runs" in ane.verify(replay=evidence).repeated


def test_a_difference_is_repeated_too(tmp_path):
    paths = [save_program(build_program(lambda x, by=by: mb.mul(x=x, y=np.float16(by), name="y"), x=(2, 3)),
                          tmp_path / f"{by}.mlpackage") for by in (2, 3)]
    evidence = tmp_path / "evidence.json"
    assert main(["verify", *paths, "--report", str(evidence)]) == 1
    assert main(["verify", "--replay", str(evidence)]) == 1
    report = ane.verify(replay=evidence)
    assert report.status == "different" and report.repeated and not report.departed


def test_feeds_are_given_again(models, tmp_path):
    feeds, evidence = {"x": np.ones((2, 3), np.float16)}, tmp_path / "evidence.json"
    ane.verify(*models, feeds=feeds, report=evidence)
    assert ane.verify(replay=evidence, feeds=feeds).repeated
    with pytest.raises(ane.InputError, match="the recorded check was of given feeds, .* pass them again with feeds="):
        ane.verify(replay=evidence)
    other = ane.verify(replay=evidence, feeds={"x": np.zeros((2, 3), np.float16)})
    assert "0 of 1 run had the recorded feeds" in other.departed


@pytest.mark.parametrize(("change", "reason"), [
    (lambda found: found.update(kind="other"), "not a report of `verify`"),
    (lambda found: found.update(schema=2), "schema 2; expected 1"),
    (lambda found: found.update(runs={}), "'runs' is missing or has the wrong type"),
    (lambda found: found["options"].update(seeds="2"), "option 'seeds' is '2'"),
    (lambda found: found["options"].update(quirks=[["x"]]), "option 'quirks' is [['x']]"),
    (lambda found: found["runs"].append(5), "run 8 of 'runs' has no string 'function'"),
    (lambda found: found["runs"][0].update(feeds=["seed 0"]), "run 1 of 'runs' has no string 'feeds'"),
    (lambda found: found["options"].update(widths=1), "option 'widths' is 1"),
    (lambda found: found["models"].pop("after"), "no path recorded for 'after'; give both models"),
])
def test_a_damaged_file_is_refused(evidence, capsys, change, reason):
    found = json.loads(evidence.read_text())
    change(found)
    evidence.write_text(json.dumps(found))
    assert main(["verify", "--replay", str(evidence)]) == 2
    assert reason in capsys.readouterr().err


def test_wrong_use(models, evidence, tmp_path, capsys):
    for arguments, reason in (
        (["--replay", str(evidence), "--seeds", "5"], "the recorded check defines the options, but found --seeds"),
        (["--replay", str(evidence), "--atol", "0"], "the recorded check defines the options, but found --atol"),
        (["--replay", str(tmp_path / "none.json")], "no file"),
        ([*models, "--report", str(tmp_path / "none" / "x.json")], "no folder"),
        ([*models, "--report", str(tmp_path / "False.mlpackage" / "x.json")], "is in the package"),
        (["--replay", str(evidence), "--report", str(evidence)], "would be replaced"),
        ([models[0], "--replay", str(evidence), "--torch", "torch:nn.Identity"],
         "before is of type Identity; evidence identifies files by digest"),
    ):
        assert main(["verify", *arguments]) == 2
        assert reason in capsys.readouterr().err
    program = ane.load(models[0]).program
    with pytest.raises(ane.InputError, match="before is of type Program; evidence identifies files"):
        ane.verify(program, models[1], report=tmp_path / "x.json")
    with pytest.raises(ane.InputError, match="found one model; expected two"):
        ane.verify(models[0])


def test_a_model_that_takes_the_place_of_another_before_it_is_read_is_refused(models, tmp_path, monkeypatch, capsys):
    """The evidence would have named a model that was not compared."""
    before, after = models
    digest = evidence_module.digest_models

    def digest_and_replace(found):
        made = digest(found)
        shutil.rmtree(after)
        shutil.copytree(before, after)
        return made

    monkeypatch.setattr(evidence_module, "digest_models", digest_and_replace)
    assert main(["verify", str(before), str(after), "--report", str(tmp_path / "new.json")]) == 2
    assert f"{after}: was modified" in capsys.readouterr().err and not (tmp_path / "new.json").exists()
