"""What users and their machines get wrong is said in words of theirs, not as a fault of ours; and nothing is lost."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401  (before memory is limited)

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.package.staging import REPLACED, Staging
from mil_ane_passes.utils.npz import StoredArray, read_arrays, write_npz
from tests.commands.test_bad_input import refused
from tests.lab.reliability.widened import limit_memory
from tests.without_torch import hide_torch

SHAPE = (1, 8, 20)


@pytest.fixture
def source(fixtures, tmp_path):
    return Path(shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "in.mlpackage"))


@pytest.fixture
def feeds(tmp_path):
    np.savez(tmp_path / "f.npz", mel=np.zeros(SHAPE, np.float32))
    return tmp_path / "f.npz"


def npy(shape, dtype="<f4", data=b"") -> bytes:
    text = str({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


def member(path, data, method=zipfile.ZIP_DEFLATED, name="mel.npy") -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, data)


def bomb(path) -> None:
    """1 GB of zeros in 5 MB, of a wrong shape."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("mel.npy", "w", force_zip64=True) as file:
            file.write(npy((1 << 28,)))
            for _ in range(64):
                file.write(bytes(1 << 24))


def flagged(path, at: int, value: int) -> None:
    """Set the two bytes `at` of the entry in the archive's directory, and those of the member's own header."""
    member(path, npy(SHAPE, data=bytes(640)))
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\1\2")
    data[entry + at:entry + at + 2] = struct.pack("<H", value)
    data[at - 2:at] = struct.pack("<H", value)
    path.write_bytes(data)


def damaged_lzma(path) -> None:
    member(path, npy(SHAPE, data=bytes(range(256)) * 3), zipfile.ZIP_LZMA)
    data = bytearray(path.read_bytes())
    data[50:90] = b"\xff" * 40
    path.write_bytes(data)


BAD = {
    "a bomb": (bomb, "found shape (268435456,), expected fp32 (1, 8, 20)"),
    "a header of 1 TB": (lambda path: member(path, npy((1 << 38,))), "declares float32 (274877906944,)"),
    "overflowing": (lambda path: member(path, npy((1 << 62, 1 << 62))), "declares float32"),
    "negative": (lambda path: member(path, npy((-1,))), "declares float32 (-1,)"),
    "short": (lambda path: member(path, npy(SHAPE, data=bytes(10))), "which is 640 bytes, but has 10"),
    "encrypted": (lambda path: flagged(path, 8, 1), "encrypted"),
    "unknown method": (lambda path: flagged(path, 10, 77), "compression"),
    "damaged LZMA": (damaged_lzma, "cannot read"),
    "no array": (lambda path: member(path, b"hello"), "cannot read"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_npz_that_cannot_be_used(case, source, tmp_path, capsys):
    make, words = BAD[case]
    folder = tmp_path / "work"
    folder.mkdir()
    make(folder / "f.npz")
    for arguments in (["run", source, "--feeds", folder / "f.npz", "-o", folder / "o.npz"],
                      ["calibrate", source, "--feeds", folder / "f.npz"], ["run", source, "--feeds", folder / "f.npz",
                                                                          "--trace"]):
        with limit_memory(3 << 28):
            line = refused(arguments, tmp_path, capsys) if case != "a bomb" else _refused_large(arguments, capsys)
        assert words in line and "internal error" not in line


def _refused_large(arguments, capsys) -> str:
    assert main([str(each) for each in arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("header", [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4), }", "{'descr': '<f4', 'fortran_order': False, ((",
    "{'descr': '<f4', b'fortran_order': False, 'shape': (3, 4), }", "{'descr': '<f4', 'shape': 3 4 }", "(" * 3000])
def test_damaged_headers_are_refused(header, tmp_path):
    text = header.encode() + b"\n"
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16))
    with pytest.raises(ane.InputError, match="feeds: cannot read"):
        read_arrays(str(tmp_path / "f.npz"))


@pytest.mark.parametrize("second", ["x.npy", "x"])
def test_two_arrays_of_one_name_are_refused(second, tmp_path):
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in (("x.npy", 1.0), (second, 2.0)):
            content = io.BytesIO()
            np.save(content, np.full((3, 4), value))
            archive.writestr(name, content.getvalue())
    with pytest.raises(ane.InputError, match="has two arrays called 'x'"):
        read_arrays(str(tmp_path / "f.npz"))


def test_large_arrays_of_the_right_shape_are_read(tmp_path):
    large = np.arange(17 << 20, dtype=np.float32)
    np.savez(tmp_path / "f.npz", a=large, b=np.float16(2))
    found = read_arrays(str(tmp_path / "f.npz"))
    assert isinstance(found["a"], StoredArray) and np.array_equal(np.asarray(found["a"]), large)
    assert np.asarray(found["a"], dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize("name", ["a\0b", "n" * 70000])
def test_names_that_an_npz_does_not_hold(name):
    with pytest.raises(ane.InputError, match="cannot be the name of an array in an .npz"):
        write_npz(io.BytesIO(), {"y": np.zeros(1), name: np.zeros(1)})


def test_results_do_not_replace_what_the_run_reads(source, feeds, tmp_path, capsys):
    other = shutil.copytree(source, tmp_path / "other.mlpackage")
    link = tmp_path / "link.npz"
    link.symlink_to(feeds)
    baseline = tmp_path / "base.json"
    assert main(["lint", str(source), "--format", "json", "-o", str(baseline)]) in (0, 1)
    config = tmp_path / "setup.cfg"
    config.write_text("[mil_ane_passes]\ntarget = m4\n")
    capsys.readouterr()
    for arguments in (
        ["run", source, "--feeds", feeds, "-o", feeds], ["run", source, "--feeds", feeds, "-o", link],
        ["run", source, "--feeds", feeds, "-o", other / "Manifest.json"],
        ["run", source, "--feeds", feeds, "-o", other / "Data" / "new.npz"],
        ["run", source, "--feeds", feeds, "-o", tmp_path / "o.npz", "--state-out", feeds],
        ["verify", source, other, "--feeds", feeds, "--report", feeds],
        ["verify", source, other, "--feeds", feeds, "--report", link],
        ["lint", source, "-o", baseline, "--baseline", baseline], ["lint", source, "-o", config, "--config", config],
        ["lint", source, "-o", other / "Manifest.json"], ["rewrite", source, "-o", other / "x.mlpackage"],
        ["mac-script", other / "mac", source], ["batch", "lint", source, "-o", other / "reports"],
    ):
        line = refused(arguments, tmp_path, capsys)
        assert "would be replaced" in line or "in the package" in line or "inside the package" in line


def test_closed_standard_output_and_deleted_folder(source, tmp_path):
    line = f'"{sys.executable}" -m mil_ane_passes lint "{source}"'
    closed = subprocess.run(["sh", "-c", f"{line} >&-"], stderr=subprocess.PIPE, text=True, env=hide_torch())
    assert closed.returncode in (0, 1) and not closed.stderr
    gone = tmp_path / "gone"
    gone.mkdir()
    deleted = subprocess.run(["sh", "-c", f'cd "{gone}" && rmdir "{gone}" && {line}'], capture_output=True, text=True,
                             env=hide_torch())
    assert deleted.returncode == 2 and not deleted.stdout
    assert deleted.stderr == ("mil-ane-passes: the working directory of this process was deleted; change to another "
                              "(cd) and run again\n")


def test_too_little_memory(source, monkeypatch, capsys):
    def lint(*given, **named):
        raise MemoryError

    monkeypatch.setattr("mil_ane_passes.commands.lint._lint_source", lint)
    assert main(["lint", str(source)]) == 2
    assert "not enough memory" in capsys.readouterr().err


def test_settings_nested_too_deep(source, tmp_path, capsys):
    path = tmp_path / "deep.toml"
    path.write_text("[tool.mil-ane-passes]\nselect = " + "[" * 100000)
    line = refused(["lint", source, "--config", path], tmp_path, capsys)
    assert "cannot be read as TOML" in line and "blocks" not in line


@pytest.mark.parametrize("damage", ['{"schema": 1, "state": "done", "files": 3}', '{"schema": 1, "files": {"a": null}}',
                                    "[" * 100000, '{"schema": 1, "state": "done", "item": {"code": "x"}}',
                                    '{"schema": 1, "outputs": {"a": 1}}'])
def test_a_damaged_record_is_about_its_package_alone(damage, fixtures, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(fixtures / "nothing_to_do.mlpackage", tmp_path / "in" / f"{name}.mlpackage")
    sources, out = [str(tmp_path / "in")], tmp_path / "out"
    assert ane.batch("lint", sources, out).exit_code in (0, 1)
    record = out / ".mil-ane-passes" / "a.txt.json"
    assert record.is_file()
    record.write_text(damage)
    report = ane.batch("lint", sources, out, overwrite=True)
    assert [item.status for item in report.items] == ["clean", "up to date"]


def test_staging_folders_of_others_are_neither_used_nor_in_the_way(tmp_path, monkeypatch):
    target = tmp_path / "out.mlpackage"
    planted = tmp_path / ".out.mlpackage.aaa.mil-ane-passes"
    (planted / REPLACED).mkdir(parents=True)
    linked = tmp_path / ".out.mlpackage.bbb.mil-ane-passes"
    linked.mkdir()
    (linked / "lock").symlink_to(tmp_path / "elsewhere")
    left = tmp_path / ".out.mlpackage.zzz.mil-ane-passes"
    left.mkdir()
    own = os.lstat
    stranger = os.stat_result([*own(planted)[:4], os.geteuid() + 1, *own(planted)[5:]])
    monkeypatch.setattr(os, "lstat", lambda path, **how: stranger if Path(path) == planted else own(path, **how))
    with Staging(target):
        assert planted.is_dir() and not target.exists() and not left.exists()


def test_weights_of_a_recurrent_op_that_do_not_fit(tmp_path, capsys):
    from coremltools.converters.mil.mil import Builder

    from mil_ane_passes.passes.examples import build_program, make_weight
    from tests.lab.reliability.widened import convert_program, widen_model, write_package

    for kind, gates in (("lstm", 4), ("gru", 3), ("rnn", 1)):
        states = {"initial_h": np.zeros((2, 3), np.float16)}
        states |= {"initial_c": np.zeros((2, 3), np.float16)} if kind == "lstm" else {}
        model = convert_program(
            build_program(
                lambda x, kind=kind, gates=gates, states=states: getattr(Builder, kind)(
                    x=x,
                    weight_ih=make_weight(gates * 3, 8),
                    weight_hh=make_weight(gates * 3, 3),
                    output_sequence=True,
                    name="y",
                    **states,
                )[0],
                x=(5, 2, 8),
            )
        )
        folder = tmp_path / kind
        folder.mkdir()
        path = write_package(folder, model, widen_model(model.get_spec(), 8, to=1000))
        assert main(["lint", str(path)]) in (0, 1)
        assert main(["rewrite", str(path), "-o", str(folder / "out.mlpackage"), "--preset", "full"]) in (0, 1, 2)
        assert "internal error" not in capsys.readouterr().err
