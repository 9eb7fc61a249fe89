"""What a user would be sorry for: folders that are no packages stay, and names that mean nothing are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mil_ane_passes.commands.main import main

FIXTURE = str(Path(__file__).parents[2] / "fixtures" / "conv_transpose_1d.mlpackage")


def refused(arguments, capsys) -> str:
    assert main(list(map(str, arguments))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_overwrite_replaces_packages_only(tmp_path, capsys):
    photos = tmp_path / "precious.mlpackage" / "photos"
    photos.mkdir(parents=True)
    (photos / "a.jpg").write_text("a")
    line = refused(["rewrite", FIXTURE, "-o", tmp_path / "precious.mlpackage", "--overwrite"], capsys)
    assert "is not a package (it has no Manifest.json); only packages are overwritten" in line
    assert (photos / "a.jpg").read_text() == "a"


def test_overwrite_takes_an_empty_folder_and_a_package(tmp_path):
    target = tmp_path / "out.mlpackage"
    target.mkdir()
    for _ in range(2):
        assert main(["rewrite", FIXTURE, "-o", str(target), "--overwrite", "--no-verify"]) == 0
    assert (target / "Manifest.json").is_file()


@pytest.mark.parametrize("name", ["out", "out.mlmodel", "out.mlpackage.bak"])
def test_an_output_is_named_as_a_package(name, tmp_path, capsys):
    line = refused(["rewrite", FIXTURE, "-o", tmp_path / name], capsys)
    assert line.endswith(("expected one that ends in .mlpackage", "expected an output that ends in .mlpackage"))
    assert not list(tmp_path.iterdir())


def test_no_passes_at_all_is_not_a_wish(tmp_path, capsys):
    line = refused(["rewrite", FIXTURE, "-o", tmp_path / "out.mlpackage", "--passes", ""], capsys)
    assert line.startswith("mil-ane-passes: passes: no name given")


def test_a_code_leads_to_the_name_of_its_pass(tmp_path, capsys):
    line = refused(["rewrite", FIXTURE, "-o", tmp_path / "out.mlpackage", "--passes", "ANE301"], capsys)
    assert line.endswith("did you mean 'lift_conv_transpose_1d'?")


def test_an_empty_path_is_no_path(tmp_path, capsys):
    line = refused(["rewrite", "", "-o", tmp_path / "out.mlpackage"], capsys)
    assert "no path" in line


@pytest.mark.parametrize("seeds", ["0", "-5", "many"])
def test_a_proof_takes_at_least_one_draw(seeds, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["verify", FIXTURE, FIXTURE, "--seeds", seeds])
    assert stop.value.code == 2 and "--seeds" in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line_too(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("mil_ane_passes.commands.rewrite_steps.apply_rewrites", lambda *_, **__: 1 / 0)
    line = refused(["rewrite", FIXTURE, "-o", tmp_path / "out.mlpackage"], capsys)
    assert line.startswith("mil-ane-passes: internal error (ZeroDivisionError: division by zero)")
    assert not list(tmp_path.iterdir())


def test_blocks_too_deep_for_python_are_told_in_one_line(monkeypatch, tmp_path, capsys):
    def deeper(depth):  # with *args, Python 3.13.0 counts no depth, and ends by a signal
        return deeper(depth + 1)

    def endless(*_, **__):
        return deeper(0)

    monkeypatch.setattr("mil_ane_passes.commands.rewrite_steps.apply_rewrites", endless)
    line = refused(["rewrite", FIXTURE, "-o", tmp_path / "out.mlpackage"], capsys)
    assert line == "mil-ane-passes: the model's blocks are nested too deeply for Python on this machine"
    assert not list(tmp_path.iterdir())


def test_the_output_may_stand_behind_the_input(tmp_path, capsys):
    target = tmp_path / "out.mlpackage"
    assert main(["rewrite", FIXTURE, str(target), "--no-verify"]) == 0
    assert f"written to {target}, not verified" in capsys.readouterr().out and (target / "Manifest.json").is_file()
    line = refused(["rewrite", FIXTURE, target], capsys)
    assert str(target) in line and "--overwrite" in line


def test_one_output_is_named_once(tmp_path, capsys):
    line = refused(["rewrite", FIXTURE, tmp_path / "a.mlpackage", "-o", tmp_path / "b.mlpackage"], capsys)
    assert line == (f"mil-ane-passes: found two outputs, '{tmp_path / 'a.mlpackage'}' and -o "
                    f"'{tmp_path / 'b.mlpackage'}'; expected one of them")
    assert not list(tmp_path.iterdir())
