"""`config`: every setting of lint, its value, and where it comes from."""

from __future__ import annotations

import json

import pytest

from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.settings import KEYS

TEXT = """
[tool.mil_ane_passes]
target = "m4"
ignore = ["fp32-io", "ANE3"]
fail-under = 92.5
baseline = "reports/lint.json"
[tool.mil_ane_passes.options.lift_conv_1d]
axis = 2
[tool.mil_ane_passes.per-op-ignores]
"encoder_*" = ["ANE205", "cumsum"]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(capsys, *options):
    assert main(["config", "--format", "json", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["command"]) == (1, "config")
    assert [each["key"] for each in data["settings"]] == list(KEYS) and all(each["help"] for each in data["settings"])
    return data["file"], {each["key"]: (each["value"], each["source"]) for each in data["settings"]}


def test_each_setting_has_its_value_and_its_source(project, capsys):
    file, found = listed(capsys)
    assert file == str(project / "pyproject.toml")
    assert found == {
        "select": (None, "default"), "ignore": (["fp32-io", "ANE3"], "file"),
        "per-op-ignores": ({"encoder_*": ["ANE205", "cumsum"]}, "file"),
        "options": ({"lift_conv_1d": {"axis": 2}}, "file"), "target": ("m4", "file"), "fail-on": ("slow", "default"),
        "fail-under": (92.5, "file"), "baseline": (str(project / "reports" / "lint.json"), "file")}


def test_without_a_file_there_are_defaults(project, capsys):
    file, found = listed(capsys, "--no-config")
    assert file is None and {source for _, source in found.values()} == {"default"}
    assert (found["target"], found["fail-on"]) == (("all", "default"), ("slow", "default"))


def test_with_fail_under_alone_findings_fail_nothing(project, capsys):
    (project / "pyproject.toml").write_text("[tool.mil_ane_passes]\nfail-under = 0\n")
    assert listed(capsys)[1]["fail-on"] == ("never", "default")


def test_the_text_is_a_table(project, capsys):
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file: {project / 'pyproject.toml'}"
    assert [line.split()[0] for line in lines[3:]] == list(KEYS)
    assert any(line.startswith("per-op-ignores  encoder_*: ANE205, cumsum ") for line in lines)
    assert any(line.split()[:3] == ["target", "m4", "file"] for line in lines)


def test_mistakes_in_the_file_are_those_of_lint(project, capsys):
    (project / "pyproject.toml").write_text("[tool.mil_ane_passes]\nfail-udner = 3\n")
    assert main(["config"]) == 2 and "did you mean 'fail-under'?" in capsys.readouterr().err
    (project / "pyproject.toml").write_text("[tool.mil_ane_passes]\ntarget = 'm1,mm4'\n")
    assert main(["config"]) == 2
    assert capsys.readouterr().err.startswith(f"mil-ane-passes: {project / 'pyproject.toml'}: target 'mm4' is unknown")
    assert main(["config", "--config", "none.cfg"]) == 2
    assert main(["config", "--config", "a.cfg", "--no-config"]) == 2
