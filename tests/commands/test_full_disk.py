"""Commands on a disk that is full: one line, exit code 2, nothing left, in each format."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from mil_ane_passes.commands.main import main
from mil_ane_passes.package import staging
from tests.commands.test_adapt_encoders import make_encoder

FIXTURE = str(Path(__file__).parents[2] / "fixtures" / "conv_transpose_1d.mlpackage")
COMMANDS = {
    "rewrite": ("out.mlpackage", ["rewrite", FIXTURE, "--no-verify"]),
    "edit": ("out.mlpackage", ["edit", FIXTURE, "--dedup-weights"]),
    "lint": ("out.json", ["lint", FIXTURE]),
}


@pytest.fixture
def encoder(tmp_path):
    return make_encoder(tmp_path / "source.mlpackage")


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A disk that holds names and nothing else."""
    real = os.fsync

    def fsync(handle):
        if os.fstat(handle).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return tmp_path


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line(full, capsys, command, form):
    name, words = COMMANDS[command]
    assert main([*words, "-o", str(full / name), "--format", form]) == 2
    out, err = capsys.readouterr()
    what = "the file" if command == "lint" else "the package"
    assert err == (f"mil-ane-passes: {full / name}: {what} cannot be written (No space left on device); nothing was "
                   f"written there: free some space, or choose another disk\n")
    assert out == "" and os.listdir(full) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_takes_nothing_is_one_line(tmp_path, capsys, monkeypatch, command):
    name, words = COMMANDS[command]

    def mkdtemp(**_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(tmp_path))

    monkeypatch.setattr(staging.tempfile, "mkdtemp", mkdtemp)
    assert main([*words, "-o", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert "cannot be written (Read-only file system: " in err
    assert err.endswith("choose a folder with write permission\n")
    assert out == "" and err.count("\n") == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch, code):
    def mkdtemp(**_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(staging.tempfile, "mkdtemp", mkdtemp)
    assert main(["mac-script", str(tmp_path / "folder"), FIXTURE]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"mil-ane-passes: {tmp_path / 'folder'}: the folder cannot be written ({os.strerror(code)}")
    assert "nothing was written there: " in err
    assert out == "" and err.count("\n") == 1 and os.listdir(tmp_path) == []


def test_a_full_disk_within_adapt_names_the_output(encoder, full, capsys):
    capsys.readouterr()
    assert main(["adapt", str(encoder), "-o", str(full / "out"), "--context", "8"]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == (
        f"mil-ane-passes: {full / 'out'}: the folder cannot be written (No space left on device); nothing was written "
        "there: free some space, or choose another disk")
    assert out == "" and ".mil-ane-passes" not in err and os.listdir(full) == ["source.mlpackage"]


def test_a_full_disk_within_a_rewrite_in_place_names_the_package(full, capsys):
    package = full / "in.mlpackage"
    shutil.copytree(FIXTURE, package)
    assert main(["lint", str(package), "--fix", "--in-place"]) == 2
    out, err = capsys.readouterr()
    assert (f"{package}: the package cannot be written (No space left on device); existing files are unchanged: free "
            "some space, or choose another disk") in err
    assert ".mil-ane-passes" not in out + err and os.listdir(full) == ["in.mlpackage"]
