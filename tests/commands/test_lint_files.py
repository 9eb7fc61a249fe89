"""Where `lint` and its siblings write: links, devices and pipes stay what they are, and no locale stops a report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.output import write_arrays
from tests.without_torch import hide_torch


@pytest.fixture(autouse=True)
def source(fixtures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return str(fixtures / "conv_transpose_1d.mlpackage")


def test_of_a_link_the_file_is_replaced(source, tmp_path, capsys):
    (tmp_path / "link").symlink_to("real.json")
    for _ in range(2):
        assert main(["lint", source, "--format", "json", "-o", "link"]) == 1
        assert os.readlink(tmp_path / "link") == "real.json"
    assert json.loads((tmp_path / "real.json").read_text())["command"] == "lint"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real.json"]


def test_what_is_no_plain_file_stays(source, tmp_path, capsys):
    """Written to, and not replaced by a file: with root's rights that would take a device from the machine."""
    os.mkfifo(tmp_path / "pipe")
    for write in (lambda: main(["lint", source, "--format", "json", "-o", "pipe"]),
                  lambda: write_arrays(Path("pipe"), {"y": np.zeros(3)})):
        with ThreadPoolExecutor() as reader:
            heard = reader.submit((tmp_path / "pipe").read_bytes)
            write()
        assert len(heard.result(20)) > 100 and (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form,locale", [
    ("text", {"PYTHONIOENCODING": "latin-1"}), ("html", {"PYTHONIOENCODING": "latin-1"}),
    ("sarif", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})])
def test_names_that_a_locale_cannot_write(form, locale, source, tmp_path):
    shutil.copytree(source, tmp_path / "modèle 声.mlpackage")
    done = subprocess.run(
        [sys.executable, "-m", "mil_ane_passes", "lint", "modèle 声.mlpackage", "--format", form, "--no-config"],
        env=hide_torch(**locale), capture_output=True, check=False)
    assert done.returncode == 1 and b"internal error" not in done.stderr, done.stderr[-300:]
    if form == "sarif":
        (run,) = json.loads(done.stdout)["runs"]
        assert run["artifacts"][0]["location"]["uri"] == "mod%C3%A8le%20%E5%A3%B0.mlpackage"
    elif form == "html":
        assert '<meta charset="utf-8">' in done.stdout.decode("utf-8")
