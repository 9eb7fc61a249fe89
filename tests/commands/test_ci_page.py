"""The page about lint in CI: its commands run as they stand there, and its settings and workflows are what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.settings import read_settings
from mil_ane_passes.passes.examples import build_program
from tests.conversions import save_program
from tests.readme.walk import ROOT, SHELL, environment, shown_anew, steps

PAGE = ROOT / "mil_ane_passes/commands/README.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = ("## Lint in CI", "## Fixes", "## Reports in Python")
ACTION = ROOT / ".github/actions/lint"


def make_models(folder: Path) -> None:
    """Save the packages that the page is about in folder/models."""
    (folder / "models").mkdir()
    save_program(build_program(lambda mel: mb.cumsum(x=mb.relu(x=mel), axis=1, name="phase"), mel=(1, 8, 16)),
                 folder / "models" / "vocoder.mlpackage")
    save_program(build_program(lambda x: mb.relu(x=x, name="y"), x=(1, 8, 16)), folder / "models" / "clean.mlpackage")


def show_anew(folder: Path) -> str:
    """The page with what its commands print now."""
    make_models(folder)
    text = TEXT
    for title in SECTIONS:
        text = shown_anew(text, folder, title, here=True)
    return text


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", TEXT, re.S)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return folder, show_anew(folder)


@pytest.fixture
def project(made, monkeypatch):
    """The folder in which the commands have run."""
    monkeypatch.chdir(made[0])
    return made[0]


def test_the_page_shows_what_its_commands_print(made):
    assert len([step for title in SECTIONS for step in steps(TEXT, title)]) == len(blocks("sh")) + len(blocks("python"))
    assert made[1] == TEXT, "run python -m tests.commands.test_ci_page to write it"


def test_its_commands_write_what_they_say(project):
    assert json.loads((project / "lint.sarif").read_text())["version"] == "2.1.0"
    assert len(json.loads((project / "lint-baseline.json").read_text())["reports"]) == 2
    assert {"lint.html", "rewrite.json", "fast.mlpackage", "fixed.mlpackage"} <= set(os.listdir(project))


@pytest.mark.parametrize("options,code", [
    ([], 1), (["--baseline", "lint-baseline.json"], 0), (["--fail-under", "0"], 0), (["none.mlpackage"], 2)])
def test_the_exit_codes(options, code, project, capsys):
    assert main(["lint", "models", "--target", "m4", *options]) == code


def test_the_settings(project, capsys):
    (text,) = blocks("toml")
    (project / "pyproject.toml").write_text(text)
    try:
        found = read_settings()
        assert (found.target, found.ignore, found.fail_under) == ("m4", ("fp32-io",), 0.0)
        assert main(["lint", "models"]) == 0 and "compared with " in capsys.readouterr().out
    finally:
        (project / "pyproject.toml").unlink()


def test_the_hook(project, capsys):
    (hook,) = yaml.safe_load(blocks("yaml")[1])["repos"][0]["hooks"]
    assert {"id", "name", "language", "entry"} <= set(hook) and hook["pass_filenames"] is False
    name, *arguments = shlex.split(hook["entry"])
    assert name == "mil-ane-passes" and main(arguments) == 0
    for path in ("models/a.mlpackage/Data/com.apple.CoreML/model.mlmodel", "a.mlpackage/Manifest.json", "a.mlmodel"):
        assert re.search(hook["files"], path)
    assert not re.search(hook["files"], "models/mlmodel.py")


def test_the_workflow_uses_the_inputs_of_the_action():
    workflow = yaml.safe_load(blocks("yaml")[0])
    (given,) = [step["with"] for step in workflow["jobs"]["lint"]["steps"] if "actions/lint@" in step["uses"]]
    inputs = yaml.safe_load((ACTION / "action.yml").read_text())["inputs"]
    assert set(given) <= set(inputs)
    listed = {name for row in re.findall(r"^\| (`.*?) \|", TEXT.partition("| input | |")[2].partition("\n\n")[0], re.M)
              for name in re.findall(r"`([\w-]+)`", row)}
    assert listed == set(inputs) and all(each["description"] and "default" in each for each in inputs.values())


def test_the_action_hands_its_inputs_to_its_scripts():
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    install, lint, upload = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    used = {re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value)[1]: name
            for step in (install, lint) for name, value in step["env"].items()}
    assert set(used) == set(action["inputs"])
    assert all(name == key.upper().replace("-", "_") for key, name in used.items())
    for step in (install, lint):
        (script,) = re.fullmatch(r'bash "\$GITHUB_ACTION_PATH/(\w+\.sh)"', step["run"]).groups()
        assert all(f"${name}" in (ACTION / script).read_text() for name in step["env"])
    assert upload["with"]["sarif_file"] == f"${{{{ steps.{lint['id']}.outputs.sarif }}}}"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def run_script(name: str, folder: Path, **inputs: str) -> subprocess.CompletedProcess:
    runner = {"RUNNER_TEMP": str(folder / "temp"), "GITHUB_OUTPUT": str(folder / "temp" / "output"),
              "GITHUB_ACTION_PATH": str(ACTION)}
    return subprocess.run(["bash", str(ACTION / name)], cwd=folder, env={**environment(), **runner, **inputs},
                          capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version,wanted", [("1.2.3", "mil_ane_passes==1.2.3"), ("", f"{ACTION}/../../..")])
def test_the_action_installs_a_version_or_its_own_source(version, wanted, tmp_path):
    write_program(tmp_path / "made" / "python", 'printf "%s\\n" "$@"')
    write_program(tmp_path / "bin" / "python3", f'[ "$1 $2" = "-m venv" ] && cp -r "{tmp_path}/made" "$3/bin"')
    (tmp_path / "temp" / "mil-ane-passes").mkdir(parents=True)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = run_script("install.sh", tmp_path, VERSION=version, PATH=path)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["-m", "pip", "install", "--quiet", wanted]), done
    assert version or (Path(wanted) / "setup.cfg").is_file()


INPUTS = {"PATHS": "models", "TARGET": "", "BASELINE": "", "FAIL_ON": "", "FAIL_UNDER": "", "SARIF": "false"}


def test_the_action_hands_on_paths_and_options(tmp_path):
    write_program(tmp_path / "temp/mil-ane-passes/bin/mil-ane-passes", 'printf "%s\\n" "$@"; exit 1')
    done = run_script("lint.sh", tmp_path, **{
        **INPUTS, "PATHS": "a b.mlpackage\n\n-c\n$(touch forged)\nm*", "TARGET": "iPhone 15 Pro", "BASELINE": "b.json",
        "FAIL_ON": "wrong", "FAIL_UNDER": "90"})
    assert done.returncode == 1 and os.listdir(tmp_path) == ["temp"]
    assert done.stdout.splitlines() == ["lint", "a b.mlpackage", "./-c", "$(touch forged)", "m*",
                                        "--target=iPhone 15 Pro", "--baseline=b.json", "--fail-on=wrong",
                                        "--fail-under=90", "--format", "github"]
    done = run_script("lint.sh", tmp_path, **{**INPUTS, "PATHS": "\n"})
    assert done.returncode == 2 and done.stdout.startswith("::error ")


def test_the_action_annotates_and_writes_sarif(project):
    write_program(project / "temp/mil-ane-passes/bin/mil-ane-passes", f'{SHELL} mil-ane-passes "$@"')
    done = run_script("lint.sh", project, **{**INPUTS, "TARGET": "m4", "SARIF": "true"})
    assert done.returncode == 1 and "::warning title=ANE205 cumsum,file=models/vocoder.mlpackage::" in done.stdout
    output = (project / "temp/output").read_text()
    assert output == f"sarif={project / 'temp/mil-ane-passes.sarif'}\n"
    (run,) = json.loads((project / "temp/mil-ane-passes.sarif").read_text())["runs"]
    assert len(run["artifacts"]) == 2


if __name__ == "__main__":
    import tempfile

    sys.stdout.reconfigure(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(show_anew(Path(place)), encoding="utf-8")
