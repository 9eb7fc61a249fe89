"""Commands on a disk that is full: one line, exit code 2, nothing left, in each format."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.models import datatypes
from coremltools.models.neural_network import NeuralNetworkBuilder

from mil_ane_passes.commands.main import main
from mil_ane_passes.package import staging
from tests.commands.test_adapt_encoders import make_encoder
from tests.package.helpers import normal

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


@pytest.mark.parametrize("limit", [1 << 10, 24 << 10])
def test_a_full_folder_for_temporary_files_is_named(tmp_path, limit):
    """The weights of the network (32 KB at fp16), or the spec of its many layers, do not fit below the limit."""
    network = tmp_path / "in.mlmodel"
    save_network(network, layers=1 if limit > 4096 else 60)
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "mil_ane_passes", "upgrade", str(network), "-o", str(tmp_path / "out.mlpackage")],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    said = done.stderr.splitlines()
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert said[0].startswith(f"mil-ane-passes: {network}: the converted program cannot be written to the folder for "
                              f"temporary files, {tmp_path / 'temporary'} (")
    assert said[0].endswith("; free some space there, or set TMPDIR to another folder")
    assert sorted(os.listdir(tmp_path)) == ["in.mlmodel", "temporary"] and not os.listdir(tmp_path / "temporary")


def save_network(path, layers):
    """Save a NeuralNetwork of one inner product of 64 KB, and activations for further layers."""
    builder = NeuralNetworkBuilder([("x", datatypes.Array(1, 64, 1, 64))], [("y", None)],
                                   disable_rank5_shape_mapping=True)
    names = ["x", *(f"value {number}" for number in range(1, layers)), "y"]
    builder.add_inner_product("product", normal(256, 64).astype(np.float32), None, 64, 256, False, names[0], names[1])
    for number in range(1, layers):
        builder.add_activation(f"layer {number}", "TANH", names[number], names[number + 1])
    ct.models.utils.save_spec(builder.spec, str(path))
