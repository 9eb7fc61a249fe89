"""Feeds that cannot be used, and places that cannot be written to: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.commands.test_bad_input import refused


def folder_at(path):
    path.mkdir()
    return path


def arrays(**values):
    return lambda path: np.savez(path, **values)


def compressed_and_damaged(path):
    np.savez_compressed(path, mel=np.arange(160, dtype=np.float32).reshape(1, 8, 20))
    data = bytearray(path.read_bytes())
    data[60:90] = b"\xff" * 30
    path.write_bytes(data)


CANNOT = "expected an .npz file with one array per input"
FEEDS = {
    "wrong name": (arrays(mell=np.zeros((1, 8, 20))), "feed 'mell': no such input; did you mean 'mel'? (inputs: mel)"),
    "one too many": (arrays(mel=np.zeros((1, 8, 20)), other=1.0), "feed 'other': no such input"),
    "none": (arrays(), "input 'mel': not fed; expected fp32 (1, 8, 20)"),
    "wrong shape": (
        arrays(mel=np.zeros((1, 8, 21))),
        "feed 'mel': found shape (1, 8, 21), expected fp32 (1, 8, 20); axis 2",
    ),
    "wrong rank": (arrays(mel=np.zeros((8, 20))), "feed 'mel': found shape (8, 20), expected fp32 (1, 8, 20)"),
    "wrong dtype": (arrays(mel=np.zeros((1, 8, 20), int)), "feed 'mel': found dtype int64, expected fp32"),
    "text dtype": (arrays(mel=np.array(["x"])), "feed 'mel': found dtype <U1, expected fp32"),
    "objects": (arrays(mel=np.array([{}])), CANNOT),
    "missing": (lambda path: None, f"feeds: no file '{{path}}'; {CANNOT}"),
    "text": (
        lambda path: path.write_text("hello"),
        f"'{{path}}' is not an .npz file; {CANNOT}, as written by np.savez(",
    ),
    "empty": (lambda path: path.write_bytes(b""), f"'{{path}}' is not an .npz file; {CANNOT}"),
    "a folder": (lambda path: path.mkdir(), f"feeds: no file '{{path}}'; {CANNOT}"),
    "one array": (lambda path: np.save(path.open("wb"), np.zeros(3)), f"feeds: '{{path}}' is a single array; {CANNOT}"),
    "cut short": (lambda path: path.write_bytes(b"PK\3\4" + b"\0" * 60), CANNOT),
    "damaged": (compressed_and_damaged, CANNOT),
}


@pytest.mark.parametrize("case", FEEDS)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_feeds_that_cannot_be_used(case, command, fixtures, tmp_path, capsys):
    make, message = FEEDS[case]
    path, source = tmp_path / "feeds.npz", fixtures / "conv_transpose_1d.mlpackage"
    make(path)
    arguments = {
        "run": ["run", source, "--feeds", path, "-o", tmp_path / "out.npz"],
        "verify": ["verify", source, source, "--feeds", path],
    }[command]
    line = refused(arguments, tmp_path, capsys)
    assert message.format(path=path) in line


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda folder: folder / "no" / "out.npz", "no folder '{folder}/no' to write 'out.npz' to; create it first"),
        (lambda folder: folder_at(folder / "out.npz"), "'{folder}/out.npz' is a folder; expected the name of an .npz "),
        (lambda folder: folder / "in.mlpackage" / "Data" / "out.npz",
         "in.mlpackage, which is never modified; expected"),
    ],
)
def test_a_place_run_cannot_write_to(output, message, fixtures, tmp_path, capsys):
    np.savez(tmp_path / "feeds.npz", mel=np.zeros((1, 8, 20)))
    source = shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "in.mlpackage")
    path = output(tmp_path)
    arguments = ["run", source, "--feeds", tmp_path / "feeds.npz", "-o", path]
    assert message.format(folder=tmp_path) in refused(arguments, tmp_path, capsys)
