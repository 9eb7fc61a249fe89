"""Rules that are ignored at single ops: counted in every format, and never silently."""

from __future__ import annotations

import json
import shutil

import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.settings import read_settings
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.utils.errors import InputError
from tests.conversions import save_program

SETTINGS = '[tool.mil_ane_passes]\ntarget = "m4"\nselect = ["ANE205"]\n[tool.mil_ane_passes.per-op-ignores]\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")

    def body(x):
        x = mb.cumsum(x=x, axis=1, name="Encoder_sums")
        return mb.cumsum(x=mb.relu(x=x), axis=1, name="decoder_sums")

    save_program(build_program(body, x=(1, 8, 16)), folder / "two.mlpackage")
    return folder


@pytest.fixture
def package(made, tmp_path, monkeypatch):
    shutil.copytree(made / "two.mlpackage", tmp_path / "two.mlpackage")
    monkeypatch.chdir(tmp_path)
    return "two.mlpackage"


def ran(capsys, *options, table='"Encoder_*" = ["ANE205"]\n', code=1):
    with open("pyproject.toml", "w", encoding="utf-8") as file:
        file.write(SETTINGS + table)
    given = main(["lint", "two.mlpackage", *options])
    printed = capsys.readouterr()
    assert given == code, printed
    return printed.out, printed.err


def test_in_text_and_json_they_are_counted(package, capsys):
    out, _ = ran(capsys)
    assert "ignored by per-op-ignores: 1 finding\n  Encoder_* (ANE205): %Encoder_sums\n" in out
    assert "ANE205 cumsum  unsupported: 1 op" in out
    data = json.loads(ran(capsys, "--format", "json")[0])
    (ignored,) = data["ignored"]
    assert (ignored["pattern"], ignored["rules"], ignored["count"]) == ("Encoder_*", ["ANE205"], 1)
    assert [item["value"] for item in ignored["findings"]] == ["Encoder_sums"]
    assert [item["value"] for item in data["findings"]] == ["decoder_sums"]
    plain = ane.lint(package, target="m4", select="ANE205")
    assert data["summary"] == json.loads(json.dumps(plain.summary())), "the prediction counts them"


def test_in_the_other_formats(package, capsys):
    out, err = ran(capsys, "--format", "concise")
    assert out.count("ANE205") == 1 and ", 0 suggestions, 1 ignored; " in err
    out, err = ran(capsys, "--format", "github")
    assert out.count("::warning ") == 1 and ", 1 ignored; " in err
    (run,) = json.loads(ran(capsys, "--format", "sarif")[0])["runs"]
    suppressed = [each for each in run["results"] if each.get("suppressions")]
    assert [each["suppressions"] for each in suppressed] == [
        [{"kind": "external", "status": "accepted", "justification": "per-op-ignores: Encoder_*"}]]
    assert len(run["results"]) == 2 and suppressed[0]["ruleIndex"] == 0
    out, _ = ran(capsys, "--statistics", "--format", "json")
    data = json.loads(out)
    assert data["summary"]["ignored"] == 1 and [row["count"] for row in data["statistics"]] == [1]
    out, _ = ran(capsys, "--format", "html")
    assert '"ignored":1' in out.replace(" ", "")
    out, _ = ran(capsys, "--target", "m1,m4")
    assert ["findings", "ignored", "1", "1"] in [line.split() for line in out.splitlines()]


def test_what_is_ignored_neither_fails_nor_is_fixed(package, capsys):
    out, _ = ran(capsys, table='"*_sums" = "cumsum"\n', code=0)
    assert "no findings" in out and "ignored by per-op-ignores: 2 findings" in out
    out, _ = ran(capsys, "--fix", "--in-place", table='"*_sums" = "cumsum"\n', code=0)
    assert "no pass fixes a finding" in out


def test_a_pattern_that_matches_nothing_is_named(package, capsys):
    out, _ = ran(capsys, table='"encoder_*" = ["ANE2"]\n')
    assert "ignored by per-op-ignores: 0 findings\n  encoder_* (ANE2): no finding\n" in out
    assert "unsupported: 2 ops" in out


def test_functions_and_other_rules(package):
    found = ane.lint(package, target="m4", select="ANE205", per_op_ignores={"main/*": "ANE2", "x": ["ANE3"]})
    assert found.findings == [] and [each.count for each in found.ignored] == [2, 0]
    found = ane.lint(package, target="m4", select="ANE205", per_op_ignores={"*": "ANE3", "other/*": "ANE205"})
    assert len(found.findings) == 2 and [each.count for each in found.ignored] == [0, 0]


def test_a_baseline_does_not_need_what_is_ignored(package, tmp_path):
    ane.lint(package, target="m4", per_op_ignores={"*": "ANE205"}).save(tmp_path / "old.json")
    assert len(ane.lint(package, target="m4", baseline=tmp_path / "old.json").baseline.new) == 2
    again = ane.lint(package, target="m4", baseline=tmp_path / "old.json", per_op_ignores={"*": "ANE205"})
    assert again.baseline.new == [] and again.baseline.gone == []


def test_layers_of_a_network_are_ignored_by_name(fixtures):
    path = next((fixtures / "onnx_coreml").glob("dilated_conv_ios13.mlmodel"))
    every = ane.lint(path).network.findings
    one = every[0]
    found = ane.lint(path, per_op_ignores={one.layer: [one.code]})
    assert found.network.findings == every[1:] and [each.count for each in found.ignored] == [1]


@pytest.mark.parametrize("name,text", [
    ("pyproject.toml", SETTINGS + '"Encoder_*" = ["ANE205", "cumsum"]\n"main/x" = "ANE3"\n'),
    ("setup.cfg", "[mil_ane_passes]\nTarget = m4\n[mil_ane_passes.per-op-ignores]\nEncoder_* = ANE205, cumsum\n"
                  "main/x = ANE3\n")])
def test_both_files_say_the_same(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    found = read_settings(start=tmp_path)
    assert found.target == "m4"
    assert found.per_op_ignores == {"Encoder_*": ("ANE205", "cumsum"), "main/x": ("ANE3",)}


@pytest.mark.parametrize("table,words", [
    ({"x": "cumsums"}, "per_op_ignores: no rule 'cumsums'; expected a code"),
    ({"x": []}, "per_op_ignores: found an empty list"),
    ({" ": "ANE2"}, "per_op_ignores: found the pattern ' '"),
    (["x"], "per_op_ignores: found ['x']; expected a mapping")])
def test_mistakes(table, words, package):
    with pytest.raises(InputError) as refused:
        ane.lint(package, per_op_ignores=table)
    assert str(refused.value).startswith(words)


def test_mistakes_in_the_file_name_it(package, capsys):
    _, err = ran(capsys, table='"x" = ["cumsums"]\n', code=2)
    assert "pyproject.toml: per_op_ignores: no rule 'cumsums'" in err
    with open("pyproject.toml", "w", encoding="utf-8") as file:
        file.write("[tool.mil_ane_passes]\nper-op-ignores = 3\n")
    assert main(["lint", package]) == 2
    assert "pyproject.toml: found per-op-ignores 3; expected a table" in capsys.readouterr().err
