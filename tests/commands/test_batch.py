"""`batch` on the command line: its words, its codes, and what is left when it is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mil_ane_passes
from mil_ane_passes.commands.main import main
from tests.commands.batching.helpers import IDLE, REWRITTEN, packages, shown
from tests.signals import hears_signals

ROOT = Path(mil_ane_passes.__file__).parent.parent


@pytest.fixture
def folder(fixtures, tmp_path):
    packages(fixtures, tmp_path / "in", b=REWRITTEN)
    packages(fixtures, tmp_path / "in/deep", a=IDLE)
    return tmp_path / "in"


def test_a_folder_is_rewritten_and_only_once(folder, tmp_path, capsys):
    arguments = ["batch", "rewrite", str(folder), "-o", str(tmp_path / "out"), "--jobs", "0"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.splitlines()[-1].endswith(": 1 unchanged, 1 written")
    assert [line.split()[0] for line in printed.out.splitlines()] == ["name", "b", "deep/a", "2"]
    assert shown(tmp_path / "out") == ["b.mlpackage", "deep"] == [*shown(tmp_path / "out")[:1], "deep"]
    assert main([*arguments, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"up to date": 2} and data["items"][0]["report"]["verified"] is True
    assert main([*arguments, "--again", "--no-verify", "--preset", "full"]) == 0
    assert "up to date" not in capsys.readouterr().out


def test_a_folder_is_linted(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["batch", "lint", "in", "-o", "reports", "--jobs", "0"]
    assert main(arguments) == 1
    assert (tmp_path / "reports/b.txt").is_file() and (tmp_path / "reports/deep/a.txt").is_file()
    assert main([*arguments, "--report", "sarif", "--fail-under", "0"]) == 0
    assert json.loads((tmp_path / "reports/b.sarif").read_text())["runs"]
    capsys.readouterr()
    (tmp_path / "setup.cfg").write_text("[mil_ane_passes]\ntarget = m99\n")
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"mil-ane-passes: {tmp_path / 'setup.cfg'}: target 'm99' is unknown")
    assert main([*arguments, "--target", "m4"]) == 1
    (tmp_path / "setup.cfg").write_text("[mil_ane_passes]\nselect = ANE9\nfail-under = 0\n")
    assert main(arguments) in (0, 2) and main([*arguments, "--no-config"]) == 1
    (tmp_path / "setup.cfg").write_text("[mil_ane_passes]\nbaseline = old.json\n")
    assert main(arguments) == 2 and "a baseline, which applies to one model only" in capsys.readouterr().err


def test_what_could_not_be_run_counts_most(folder, tmp_path, capsys):
    arguments = ["batch", "lint", str(folder), str(tmp_path / "no.mlpackage"), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--jobs", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "" and "no such file or folder" in printed.out.splitlines()[3]


@pytest.mark.parametrize(("arguments", "words"), [
    (["rewrite", "a.mlpackage"], "no output folder; expected -o DIR, or --dry-run"),
    (["lint", "a.mlpackage"], "no output folder for the reports; expected -o DIR"),
    (["rewrite", "", "-o", "out"], "no packages given"),
    (["rewrite", "a.mlpackage", "-o", "a.mlpackage/out"], "sources are never modified"),
])
def test_bad_input_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["batch", *arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err + printed.out and "Traceback" not in printed.err


def started(folder: Path, out: Path) -> subprocess.Popen:
    """The command, when it is done with its first package at least."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mil_ane_passes", "batch", "rewrite", str(folder), "-o", str(out)], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=hears_signals)
    deadline = time.monotonic() + 120
    while len(list(out.glob("*.mlpackage"))) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    return process


def group_is_gone(group: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_stopped_batch_leaves_whole_results_and_goes_on_with_the_rest(number, fixtures, tmp_path, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    names = [f"p{index}" for index in range(8)]
    packages(fixtures, folder, **dict.fromkeys(names, "nmp"))
    process = started(folder, out)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=120)
    assert group_is_gone(process.pid)
    assert "Traceback" not in errors
    left = len(list(out.glob("*.mlpackage")))
    assert 2 <= left < 8
    assert main(["batch", "rewrite", str(folder), "-o", str(out), "--jobs", "0", "--format", "json"]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    done = counts["up to date"]
    assert counts["unchanged"] + done == 8 and done in (left, left - 1)  # the last one may lack its record
    assert shown(out) == [f"{name}.mlpackage" for name in names]
    if number == signal.SIGINT:
        heard = int(re.search(r"interrupted: (\d) of 8 done; run the same command again", errors)[1])
        assert process.returncode == 130 and done - 2 <= heard <= done  # two workers, whose last words may be unheard
        assert printed.splitlines()[-1].endswith(f": {8 - heard} not run" + f", {heard} unchanged" * (heard > 0))
