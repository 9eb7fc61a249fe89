"""`lint` on several targets: a table with the targets side by side."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.targets import split_targets
from tests.conversions import save_program

TARGETS = "m1,a17,m4"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A package with an op that only the M4 supports, one that none does, and some that all support."""
    folder = tmp_path_factory.mktemp("made")

    def body(x):
        x = mb.mul(x=mb.relu(x=x), y=x)
        return mb.cumsum(x=mb.sin(x=x, name="wave"), axis=1, name="sums")

    save_program(build_program(body, x=(1, 8, 16)), folder / "mixed.mlpackage")
    return folder


@pytest.fixture
def package(made, tmp_path, monkeypatch):
    shutil.copytree(made / "mixed.mlpackage", tmp_path / "mixed.mlpackage")
    monkeypatch.chdir(tmp_path)
    return "mixed.mlpackage"


def ran(capsys, *arguments, code):
    given = main(["lint", *map(str, arguments), "--no-config"])
    printed = capsys.readouterr()
    assert given == code, printed
    return printed.out, printed.err


@pytest.mark.parametrize("text,names", [
    ("m4", ["m4"]), ("m1,a17,m4", ["m1", "a17", "m4"]), (" m1 , m4 ", ["m1", "m4"]), ("m4,m4", ["m4"]),
    ("Mac16,12", ["Mac16,12"]), ("m1,Mac16,12,iPhone 15 Pro", ["m1", "Mac16,12", "iPhone 15 Pro"]),
    ("iPhone17,1,m4", ["iPhone17,1", "m4"]), ("m1,,m4", ["m1", "", "m4"])])
def test_targets_are_split_at_commas_but_identifiers_are_not(text, names):
    assert split_targets(text) == names


def test_the_json_has_what_the_reports_of_each_target_have(package, capsys):
    data = json.loads(ran(capsys, package, "--target", TARGETS, "--format", "json", code=1)[0])
    assert (data["schema"], data["command"], data["targets"], data["failed"]) == (2, "lint", ["m1", "a17", "m4"], [])
    (only,) = data["packages"]
    assert only["model"] == package
    for each in only["targets"]:
        report = ane.lint(package, target=each["target"])
        assert each["summary"] == json.loads(json.dumps(report.summary()))
        assert sum(kind["count"] for kind in each["kinds"]) == len(report.plan.rows)
        assert sum(kind["supported"] for kind in each["kinds"]) == each["summary"]["ane_supported"]
        assert all(kind["supported"] + kind["unsupported"] + kind["unknown"] == kind["count"] for kind in each["kinds"])
        assert sum(rule["count"] for rule in each["findings"]) == len(report.findings)
    support = {each["target"]: {kind["op"]: kind["supported"] for kind in each["kinds"]} for each in only["targets"]}
    assert (support["m1"]["sin"], support["m4"]["sin"], support["m4"]["cumsum"]) == (0, 1, 0)


def test_the_text_is_a_table_with_a_column_for_each_target(package, capsys):
    out, err = ran(capsys, package, "--target", TARGETS, code=1)
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith("mixed.mlpackage on 3 targets, predicted: ") and err == ""
    assert lines[1] == ["m1", "a17", "m4"]
    (wave,) = [line for line in lines if line[0:1] == ["sin"]]
    assert wave[1] == "0/1" and wave[-1] == "1/1"
    assert ["cumsum", "0/1", "0/1", "0/1"] in lines
    assert ["ANE205", "cumsum", "(unsupported)", "1", "1", "1"] in lines
    shares = next(line for line in lines if line[:3] == ["%", "of", "ops"])
    assert shares[3:] == [f"{ane.lint(package, target=each).share:.1f}" for each in TARGETS.split(",")]


def test_kinds_supported_everywhere_are_listed_on_request(package, capsys):
    brief, _ = ran(capsys, package, "--target", "m4,Mac16,12", code=1)
    everything, _ = ran(capsys, package, "--target", "m4,Mac16,12", "--all", code=1)
    listed = [line.split()[0] for line in everything.splitlines() if "/" in line]
    assert "relu" in listed and len(listed) > sum("/" in line for line in brief.splitlines())
    hidden = [line for line in brief.splitlines() if "supported on every target (--all shows them)" in line]
    assert bool(hidden) == ("relu" not in brief)


def test_several_packages_a_file_and_one_that_cannot_be_read(package, capsys):
    shutil.copytree(package, "other.mlpackage")
    os.mkdir("poor.mlpackage")
    out, err = ran(capsys, "other.mlpackage", "poor.mlpackage", package, "--target", TARGETS, code=2)
    assert out.count(" on 3 targets, predicted: ") == 2 and err.startswith("mil-ane-passes: poor.mlpackage")
    printed, _ = ran(capsys, "other.mlpackage", "poor.mlpackage", package, "--target", TARGETS, "-o", "t.txt", code=2)
    with open("t.txt", encoding="utf-8") as file:
        assert file.read() == out and printed == "written to t.txt\n"


@pytest.mark.parametrize("gate,code", [
    (["--fail-on", "never"], 0), (["--fail-under", "0"], 0), (["--fail-under", "100"], 1)])
def test_each_target_has_to_pass_the_gates(gate, code, package, capsys):
    _, err = ran(capsys, package, "--target", "m1,m4", *gate, code=code)
    assert bool(err) == bool(code)
    if code:
        assert [line.split(": ")[1] for line in err.splitlines()] == [f"{package} on m1", f"{package} on m4"]


def test_a_wrong_name_among_them_has_the_message_of_one(package, capsys):
    _, alone = ran(capsys, package, "--target", "mm4", code=2)
    _, among = ran(capsys, package, "--target", "m1,mm4", code=2)
    assert among == alone and "target 'mm4' is unknown; " in alone


@pytest.mark.parametrize("options,words", [
    (["--format", "sarif"], "--format sarif: with several targets; expected text or json"),
    (["--statistics"], "--statistics applies to one target"), (["--sizes"], "--sizes applies to one target"),
    (["--baseline", "old.json"], "--baseline applies to one target"),
    (["--fix", "--in-place"], "--fix applies to one target")])
def test_options_about_one_target(options, words, package, capsys):
    out, err = ran(capsys, package, "--target", TARGETS, *options, code=2)
    assert out == "" and err.startswith(f"mil-ane-passes: {words}")
