"""Lookups in folders that `adapt` has written run on the CPU: lint does not judge them."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.adapted_folder import is_cpu_lookup
from mil_ane_passes.commands.main import main

ENCODER = {"schema": 1, "kind": "encoder", "lookup": "lookup.mlpackage", "main": "encoder.mlpackage"}
DECODER = {"schema": 1, "kind": "decoder", "once": {"package": "once.mlpackage"}, "parts": [
    {"lookup": "lookup.mlpackage", "main": [{"package": "decoder.mlpackage"}]}]}
OPTIONS = ("--target", "m4", "--no-config")
LINE = "lookup.mlpackage: for the CPU (manifest.json): not judged"


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """The working directory, with the folder of an encoder whose lookup has a finding."""
    shutil.copytree(made / "found.mlpackage", tmp_path / "adapted" / "lookup.mlpackage")
    shutil.copytree(made / "clean.mlpackage", tmp_path / "adapted" / "encoder.mlpackage")
    (tmp_path / "adapted" / "manifest.json").write_text(json.dumps(ENCODER))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "adapted"


def run(capsys, *arguments, code=0):
    given = main(["lint", *map(str, arguments), *OPTIONS])
    printed = capsys.readouterr()
    assert given == code, printed
    return printed.out


@pytest.mark.parametrize("gates", [[], ["--fail-under", "100"], ["--fail-on", "suggestion"]])
def test_a_lookup_is_listed_and_does_not_count_for_gates(folder, capsys, gates):
    shutil.rmtree(folder / "encoder.mlpackage")
    out = run(capsys, "adapted", *gates)
    assert out == f"adapted/{LINE}\n\n0 packages: 0 findings, 0 suggestions; 0 of 0 ops predicted on the ANE; " \
                  "1 for the CPU, not judged\n"
    assert run(capsys, "adapted/lookup.mlpackage", *gates) == f"adapted/{LINE}\n"


def test_the_other_packages_of_the_folder_are_judged(folder, made, capsys):
    shutil.rmtree(folder / "encoder.mlpackage")
    shutil.copytree(made / "found.mlpackage", folder / "encoder.mlpackage")
    out = run(capsys, "adapted", code=1)
    assert out.count("ANE205") == 1 and f"adapted/{LINE}\n" in out
    assert out.splitlines()[-1].startswith("1 package: 1 finding (1 unsupported)")


def test_json_states_why_there_are_no_findings(folder, capsys):
    found = json.loads(run(capsys, "adapted", "--format", "json"))
    main_, lookup = found["reports"]
    assert lookup["not_judged"] == "for the CPU (manifest.json)" and lookup["findings"] == lookup["near_misses"] == []
    assert "not_judged" not in main_ and found["schema"] == 2
    assert found["summary"]["packages"] == 1 and found["summary"]["not_judged"] == 1
    single = json.loads(run(capsys, "adapted/lookup.mlpackage", "--format", "json"))
    assert single == lookup and single["next_step"] is None


@pytest.mark.parametrize(("form", "said"), [
    ("concise", ""), ("github", ""), ("sarif", '"not_judged": "for the CPU (manifest.json)"'),
    ("html", "for the CPU (manifest.json): not judged.")])
def test_other_forms_have_no_findings(folder, capsys, form, said):
    out = run(capsys, "adapted/lookup.mlpackage", "--format", form)
    assert said in out and "ANE205" not in out.partition("<script")[0]


def test_statistics_and_several_targets_leave_it_out(folder, capsys):
    counted = json.loads(run(capsys, "adapted", "--statistics", "--format", "json"))
    assert {each["severity"] for each in counted["statistics"]} == {"suggestion"}
    assert [each["op"] for each in counted["op_kinds"]] == ["relu"]
    several = ["lint", "adapted/lookup.mlpackage", "--target", "m1,m4", "--no-config"]
    assert main([*several, "--fail-under", "100"]) == 0
    assert capsys.readouterr().out == f"adapted/{LINE}\n"
    assert main([*several, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"][0]["not_judged"] == "for the CPU (manifest.json)"


def test_a_baseline_with_its_findings_is_not_compared(folder, capsys):
    (folder / "manifest.json").rename("kept.json")
    run(capsys, "adapted", "--format", "json", "-o", "baseline.json", code=1)
    os.rename("kept.json", folder / "manifest.json")
    assert f"adapted/{LINE}\n" in run(capsys, "adapted", "--baseline", "baseline.json")


def test_python_reports_the_same(folder):
    report = ane.lint(folder / "lookup.mlpackage", target="m4")
    assert report.not_judged and report.findings == [] and str(report) == f"{folder}/{LINE}"
    assert ane.lint(ane.load(folder / "lookup.mlpackage"), target="m4").not_judged
    assert not ane.lint(folder / "encoder.mlpackage", target="m4").not_judged


@pytest.mark.parametrize(("name", "expected"), [
    ("lookup.mlpackage", True), ("decoder.mlpackage", False), ("once.mlpackage", False), ("other.mlpackage", False)])
def test_lookups_of_a_decoder(tmp_path, name, expected):
    (tmp_path / "manifest.json").write_text(json.dumps(DECODER))
    assert is_cpu_lookup(tmp_path / name) == is_cpu_lookup(f"{tmp_path}/{name}/") == expected


@pytest.mark.parametrize("text", [
    "", "{", "null", "[1]", '"lookup.mlpackage"', "\xff", "[" * 100_000, '{"schema": 1}',
    json.dumps({**ENCODER, "schema": 2}), json.dumps({**ENCODER, "kind": "page"}), json.dumps({**ENCODER, "kind": []}),
    json.dumps({**ENCODER, "lookup": ["lookup.mlpackage"]}), json.dumps({**ENCODER, "lookup": "../lookup.mlpackage"}),
    json.dumps({**ENCODER, "main": "lookup.mlpackage"}), json.dumps({**DECODER, "parts": "lookup.mlpackage"}),
    json.dumps({**DECODER, "parts": [None, 3, ["lookup.mlpackage"]]}),
    json.dumps({**DECODER, "once": {"package": "lookup.mlpackage"}}), json.dumps(ENCODER) + " " * (1 << 22),
    '{"once": ' + "[" * 900 + "]" * 900 + f", {json.dumps({**DECODER, 'schema': 3})[1:]}",
], ids=range(19))
def test_another_manifest_is_ignored(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    assert not is_cpu_lookup(tmp_path / "lookup.mlpackage")


def test_a_manifest_that_is_no_file_is_ignored(tmp_path):
    assert not is_cpu_lookup(tmp_path / "lookup.mlpackage")
    os.mkfifo(tmp_path / "manifest.json")
    assert not is_cpu_lookup(tmp_path / "lookup.mlpackage")
    os.remove(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").mkdir()
    assert not is_cpu_lookup(tmp_path / "lookup.mlpackage")
