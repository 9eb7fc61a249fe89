"""`mil-ane-passes edit`: what it prints and how it ends."""

from __future__ import annotations

import json
import shutil

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.package import files, package_writer
from tests.package.helpers import tree

NMP, CONV = "nmp.mlpackage", "conv_transpose_1d.mlpackage"


def run(*arguments):
    return main(["edit", *map(str, arguments)])


def test_what_was_done_in_words(fixtures, tmp_path, capsys):
    target = tmp_path / "out.mlpackage"
    assert run(fixtures / NMP, "-o", target, "--rename", "input_2=audio", "--drop-output", "Identity_1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--drop-output  'Identity_1' is removed from the outputs"
    assert "--rename  input 'input_2' is called 'audio'" in lines
    assert lines[-1].startswith(f"written to {target} in ")
    assert list(ane.load(target).program.functions["main"].inputs) == ["audio"]


def test_what_was_done_as_json(fixtures, tmp_path, capsys):
    target = tmp_path / "out.mlpackage"
    assert run(fixtures / NMP, "-o", target, "--expose", "Identity", "--io", "fp32", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") >= 0 and found.pop("version") == ane.__version__
    assert found == {
        "schema": 1, "tool": "mil-ane-passes", "command": "edit", "source": str(fixtures / NMP),
        "outputs": [str(target)], "status": "unchanged", "changed": False, "exact": True,
        "done": [{"option": "--expose", "function": "main", "value": "Identity",
                  "note": "'Identity' is an output already",
                  "changed": False, "exact": True},
                 {"option": "--io", "function": "main", "value": "",
                  "note": "no input or output is an array of the other float type than fp32",
                  "changed": False, "exact": True}],
        "weight_bytes": {"before": 145956, "after": 145956},
    }
    assert tree(target) == tree(fixtures / NMP)


def test_a_dry_run_writes_nothing(fixtures, tmp_path, capsys):
    target = tmp_path / "out.mlpackage"
    assert run(fixtures / NMP, "-o", target, "--rename", "input_2=audio", "--dry-run") == 0
    assert capsys.readouterr().out.endswith("dry run: nothing written\n")
    assert run(fixtures / NMP, "--rename", "input_2=audio", "--dry-run") == 0
    assert not list(tmp_path.iterdir())


def test_the_command_does_what_the_function_does(fixtures, tmp_path):
    options = ["--rename", "mel=spectrum", "--rename", "waveform=audio", "--expose", "input_3_cast_fp16", "--expose",
               "input_5_cast_fp16", "--drop-output", "waveform", "--io", "fp32", "mel"]
    assert run(fixtures / CONV, *options[2:], "--dry-run") == 2  # waveform is dropped and cannot be renamed
    del options[2:4]
    assert run(fixtures / CONV, *options, "-o", tmp_path / "command.mlpackage") == 0
    ane.edit(fixtures / CONV, tmp_path / "function.mlpackage", rename={"mel": "spectrum"}, drop_output="waveform",
             io={"fp32": ["mel"]}, expose=["input_3_cast_fp16", "input_5_cast_fp16"])
    assert tree(tmp_path / "command.mlpackage") == tree(tmp_path / "function.mlpackage")


@pytest.mark.parametrize(("options", "message"), [
    ([], "no edit requested"),
    (["--rename", "x"], "--rename x: expected A=B, such as --rename x=logits"),
    (["--rename", "=b"], "--rename =b: expected A=B, such as --rename var_12=logits"),
    (["--rename", "x="], "--rename x=: expected A=B"),
    (["--rename", "x=a", "--rename", "x=b"], "--rename x=b: 'x' is given twice (first as x=a)"),
    (["--rename", "nowhere=b"], "there is no value 'nowhere' in the model"),
    (["--io", "fp32", "--io", "fp32", "x"], "--io fp32 is given without names more than once"),
    (["--io", "bf16"], "'bf16' is not a supported type"),
    (["--split-at", ""], "--split-at: found an empty name; expected the name of a value"),
    (["--expose", "", "--rename", "input_2=a"], "--expose: found an empty name"),
    (["--drop-output", "", "--rename", "input_2=a"], "--drop-output: found an empty name"),
    (["--rename", "input_2=a", "--function", "mian"], "no function 'mian'; the model has main; did you mean 'main'?"),
])
def test_what_cannot_be_done_is_one_line_and_two(fixtures, tmp_path, capsys, options, message):
    assert run(fixtures / NMP, "-o", tmp_path / "out.mlpackage", *options) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arguments", "message"), [
    (["in.mlpackage", "--rename", "a=b"], "no output given; expected -o OUT.mlpackage, or --dry-run"),
    (["", "-o", "out.mlpackage", "--rename", "a=b"], "no path given"),
    (["nothing.mlpackage", "--dry-run", "--rename", "a=b"], "no such file or folder"),
])
def test_paths_that_cannot_be(capsys, arguments, message):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_what_exists_is_replaced_only_when_asked(fixtures, tmp_path, capsys):
    target = tmp_path / "out.mlpackage"
    edit = [fixtures / NMP, "-o", target, "--rename", "input_2=audio"]
    assert run(*edit) == 0
    assert run(*edit) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(*edit, "--overwrite") == 0
    assert run(fixtures / NMP, "-o", fixtures / NMP, "--rename", "input_2=audio", "--overwrite") == 2
    assert "the source is never modified" in capsys.readouterr().err


@pytest.mark.parametrize("link", [False, True])
def test_link_shares_what_stays(fixtures, tmp_path, link, monkeypatch):
    for module in (files, package_writer):
        monkeypatch.setattr(module, "clone_file", lambda source, target: False)
    source = tmp_path / "source.mlpackage"
    shutil.copytree(fixtures / CONV, source)
    options = ["--link"] if link else []
    assert run(source, "-o", tmp_path / "out.mlpackage", "--rename", "waveform=sound", *options) == 0
    one, other = (path / "Data/com.apple.CoreML/weights/weight.bin" for path in (source, tmp_path / "out.mlpackage"))
    assert one.read_bytes() == other.read_bytes()
    assert one.samefile(other) is link


@pytest.mark.parametrize("place", [".", "/", ""])
def test_a_place_without_a_name_is_no_place_for_parts(place, fixtures, capsys):
    assert main(["edit", str(fixtures / CONV), "--split-at", "x", "-o", place]) == 2
    assert "is not the name of a package; expected one that ends in .mlpackage" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--io", "fp16"), ("--split-at", "x")])
def test_options_that_take_many_names_do_not_hide_where_the_package_stands(fixtures, capsys, option):
    with pytest.raises(SystemExit):
        run("-o", "out.mlpackage", *option, fixtures / CONV)
    assert "edit IN -o OUT" in capsys.readouterr().err
