"""The command: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mil_ane_passes
from mil_ane_passes import load, rewrite
from mil_ane_passes._version import __version__
from mil_ane_passes.commands.main import _keep_threads_from_spinning, main
from mil_ane_passes.commands.pages import collect_pages
from mil_ane_passes.commands.passes import Catalogue
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Rewrite
from mil_ane_passes.passes.registry import fixes_for, get_all_rules
from mil_ane_passes.runtime.registry import load_kernels
from tests.without_torch import hide_torch

ROOT = Path(mil_ane_passes.__file__).parent.parent
KEYS = [
    "schema",
    "tool",
    "version",
    "command",
    "source",
    "output",
    "status",
    "preset",
    "target",
    "passes",
    "changed",
    "verified",
    "traces",
    "verify",
    "verify_command",
    "ops",
    "weight_bytes",
    "predicted",
    "wrong_numbers",
    "left_out_passes",
    "blamed",
    "failed_passes",
    "seconds",
    "diff",
]


@pytest.fixture
def source(fixtures):
    return str(fixtures / "conv_transpose_1d.mlpackage")


@pytest.fixture
def idle(fixtures):
    return str(fixtures / "nothing_to_do.mlpackage")


def files(path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(Path(path).rglob("*")) if file.is_file()}


def strict(text: str):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_rewrite_writes_a_proved_package_and_leaves_the_source(source, tmp_path, capsys):
    before = files(source)
    out = tmp_path / "out.mlpackage"
    assert main(["rewrite", source, "-o", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "ane::lift_conv_transpose_1d  ANE301 conv-transpose-1d-bias  2 matches, bitwise" in printed.out
    assert "equal in 12 runs at float64, float16, bit for bit" in printed.out
    done, following, words = printed.out.splitlines()[-3:]
    assert done.startswith(f"written to {out} in ")
    assert following == f"next: mil-ane-passes lint {out}", "the command can be copied with the rest of its line"
    assert words == "  This lists the ops that are still off the ANE, with reasons."
    assert files(source) == before and os.listdir(tmp_path) == ["out.mlpackage"]
    found = [op for _, op in iterate_ops(load(out).program) if op.op_type == "conv_transpose"]
    assert [op.x.rank for op in found] == [4, 4]


def test_rewrite_copies_what_needs_nothing(idle, tmp_path, capsys):
    assert main(["rewrite", idle, "-o", str(tmp_path / "out.mlpackage")]) == 0
    done, following, words = capsys.readouterr().out.splitlines()
    assert done.startswith("nothing to do: no pass matched; the package was copied as it is to ")
    assert following == f"next: mil-ane-passes lint {idle}"
    assert words == "  This lists the ops that are off the ANE, if any, with reasons; --preset full runs more passes."
    assert files(tmp_path / "out.mlpackage") == files(idle)


def test_the_next_step_is_not_the_preset_that_the_named_passes_override(idle, tmp_path, capsys):
    assert main(["rewrite", idle, "-o", str(tmp_path / "out.mlpackage"), "--preset", "full", "--passes", "safe"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("--passes replaces --preset full; --passes full,... runs both\n")
    assert "; --passes full runs more passes." in said


def test_a_preset_that_is_among_the_passes_is_not_said_to_be_replaced(idle, capsys):
    for given in (["--preset", "full"], ["--preset", "full", "--passes", "full,fp16_io"], ["--passes", "fp16_io"]):
        assert main(["rewrite", idle, "--dry-run", *given]) == 0
        assert "replaces" not in capsys.readouterr().out, given


def test_the_next_step_of_a_report_in_python_is_spelled_for_python(idle):
    assert str(rewrite(idle)).endswith("next: preset='full' runs more passes")


@pytest.mark.parametrize("line", [
    "lint IN", "rewrite IN --dry-run", "verify IN IN", "calibrate IN", "run IN --feeds FEEDS -o OUT.npz",
    "edit IN -o OUT.mlpackage --io fp16", "passes", "patches", "config", "explain ANE301", "explain guard",
], ids=lambda line: line.partition(" IN")[0].replace(" ", "-"))
def test_the_json_of_each_command_names_its_origin(source, tmp_path, capsys, line):
    np.savez(tmp_path / "feeds.npz", mel=np.zeros((1, 8, 20), np.float32))
    words = line.replace("IN", str(source)).replace("FEEDS", str(tmp_path / "feeds.npz"))
    assert main([*words.replace("OUT", str(tmp_path / "out")).split(), "--format", "json"]) in (0, 1)
    data = strict(capsys.readouterr().out)
    assert list(data)[:4] == ["schema", "tool", "version", "command"]
    assert (data["tool"], data["version"], data["command"]) == ("mil-ane-passes", __version__, line.split()[0])


@pytest.mark.parametrize("output", [[], ["-o", "out.mlpackage"]])
def test_a_dry_run_writes_nothing(source, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["rewrite", source, "--dry-run", *output]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "dry run: nothing verified, nothing written"
    assert os.listdir(tmp_path) == []


def test_diff_shows_the_mil(source, capsys):
    assert main(["rewrite", source, "--dry-run", "--diff"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "--- before" in lines and "+++ after" in lines
    assert any(line.startswith("-") and "= conv_transpose(" in line for line in lines)
    assert any(line.startswith("+") and "= expand_dims(" in line for line in lines)


def test_json_is_the_reports_dictionary(source, tmp_path, capsys):
    assert main(["rewrite", source, "-o", str(tmp_path / "a.mlpackage"), "--format", "json"]) == 0
    data = strict(capsys.readouterr().out)
    report = rewrite(source, tmp_path / "b.mlpackage").to_dict()
    assert list(data) == list(report) == KEYS
    for key in set(KEYS) - {"output", "seconds", "traces"}:
        assert data[key] == json.loads(json.dumps(report[key])), key
    assert (data["schema"], data["version"], data["command"], data["status"]) == (1, __version__, "rewrite", "written")
    assert data["source"] == source and data["output"] == str(tmp_path / "a.mlpackage")
    fired = {trace["pass"]: len(trace["fired"]) for trace in data["traces"]}
    assert list(fired) == data["passes"] and fired["lift_conv_transpose_1d"] == 2
    assert list(data["traces"][0]) == [
        "pass",
        "fired",
        "near_misses",
        "exactness",
        "fixes_nonfinite",
        "moves",
        "rounds",
        "ops_before",
        "ops_after",
        "seconds",
    ]
    lifted = next(trace for trace in data["traces"] if trace["fired"])
    assert set(lifted["fired"][0]) == {
        "code", "slug", "rule", "function", "op", "value", "reason", "near_miss", "origin"}
    assert data["verify"]["equal_bits"] is True and data["diff"] is None and data["verified"] is True


@pytest.mark.parametrize(
    "asked",
    [
        ["--preset", "full"],
        ["--passes", "lift_conv_transpose_1d{axis=2}"],
        ["--passes", "safe,split_conv_transpose_bias"],
        ["--target", "m1"],
    ],
)
def test_what_is_asked_for_is_done(source, asked, tmp_path, capsys):
    assert main(["rewrite", source, "-o", str(tmp_path / "out.mlpackage"), "--format", "json", *asked]) == 0
    data = strict(capsys.readouterr().out)
    assert data["status"] == "written" and data["verified"] and data["changed"]
    assert data["target"] == (asked[1] if asked[0] == "--target" else "all")
    if "axis=2" in asked[1]:
        assert data["passes"] == ["lift_conv_transpose_1d"]
        assert "kernel on the width" in data["traces"][0]["fired"][0]["reason"]


@pytest.mark.parametrize("asked", [["--preset", "full"], ["--passes", "full"], ["--passes", "lift_conv_1d"]])
def test_what_was_tried_is_not_proposed(idle, asked, tmp_path, capsys):
    assert main(["rewrite", idle, "-o", str(tmp_path / "out.mlpackage"), *asked]) == 0
    command, words = capsys.readouterr().out.splitlines()[-2:]
    assert command == f"next: mil-ane-passes lint {idle}"
    assert words == "  This lists the ops that are off the ANE, if any, with reasons."


@pytest.mark.parametrize(("target", "outside"), [("m1", ["tangent"]), ("m3", []), ("all", [])])
def test_a_pass_by_name_that_is_for_none_of_the_targets_chips_is_said_to_have_done_nothing(idle, target, outside,
                                                                                         capsys):
    asked = ("rewrite", idle, "--dry-run", "--target", target, "--passes", "safe,tangent{always=true}")
    assert main([*asked]) == 0
    text = capsys.readouterr().out
    assert ("ane::tangent  did not run: it applies to M3, " in text) == bool(outside)
    assert (", and the target is m1\n" in text) == bool(outside) == ("did not run" in text)
    assert main([*asked, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out).get("outside", []) == outside


def test_overwrite_replaces(source, idle, tmp_path, capsys):
    out = tmp_path / "out.mlpackage"
    assert main(["rewrite", idle, "-o", str(out)]) == 0
    assert main(["rewrite", source, "-o", str(out), "--overwrite"]) == 0
    assert "conv_transpose" in {op.op_type for _, op in iterate_ops(load(out).program)}


def test_an_op_that_cannot_be_run_is_not_proved_and_not_written(source, tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(load_kernels(), "tanh")
    out = tmp_path / "out.mlpackage"
    assert main(["rewrite", source, "-o", str(out)]) == 1
    text = capsys.readouterr().out
    assert ("not verified: the unmodified model already fails the equivalence check with itself: the reference "
            "runtime has no "
            "kernel for: tanh ('") in text and "--no-verify" in text
    assert "nothing written" in text and os.listdir(tmp_path) == []
    assert main(["rewrite", source, "-o", str(out), "--no-verify"]) == 0
    assert "not verified (--no-verify)" in capsys.readouterr().out
    assert out.is_dir()


def test_a_result_that_differs_is_not_written(source, tmp_path, monkeypatch, capsys):
    from mil_ane_passes.passes.registry import find_rewrite

    lift = find_rewrite("lift_conv_transpose_1d")
    right = lift.rewrite
    monkeypatch.setattr(lift, "rewrite", lambda self, hit, mb: mb.mul(x=right(self, hit, mb), y=np.float16(0.5)))
    asked = ["--passes", "lift_conv_transpose_1d", "--format", "json"]
    assert main(["rewrite", source, "-o", str(tmp_path / "out.mlpackage"), *asked]) == 1
    data = strict(capsys.readouterr().out)
    assert data["status"] == "not verified" and data["verify"]["status"] == "different"
    assert os.listdir(tmp_path) == []


def test_verify_equal_and_different(source, tmp_path, capsys):
    rewrite(source, tmp_path / "lifted.mlpackage")
    rewrite(source, tmp_path / "split.mlpackage", passes="split_conv_transpose_bias")
    lifted, split = str(tmp_path / "lifted.mlpackage"), str(tmp_path / "split.mlpackage")
    assert main(["verify", source, lifted]) == 0
    assert capsys.readouterr().out == ("equal in 6 runs at float64, bit for bit\n"
                                       "  sampled: normal draws, wide range, NaN and infinities, ties\n")
    assert main(["verify", source, split, "--precision", "float16", "--exactness", "bitwise", "--format", "json"]) == 1
    data = strict(capsys.readouterr().out)
    assert (data["schema"], data["status"]) == (1, "different")
    assert main(["verify", source, split, "--precision", "float16", "--seeds", "1"]) == 0
    assert capsys.readouterr().out == ("equal in 5 runs at float64, float16, judged as rounding\n"
                                       "  sampled: normal draws, wide range, NaN and infinities, ties\n"
                                       "  float64: 6 of 40 ops read the same values in both models; they ran once for "
                                       "both, at float32 to save time, which does not affect the comparison\n")


def test_verify_with_feeds(source, fixtures, tmp_path, capsys):
    np.savez(tmp_path / "feeds.npz", mel=np.load(fixtures / "conv_transpose_1d.npz")["mel"])
    assert main(["verify", source, source, "--feeds", str(tmp_path / "feeds.npz")]) == 0
    assert capsys.readouterr().out == (
        "equal in 1 run at float64, bit for bit\n"
        "  float64: 8 of 8 ops read the same values in both models; they ran once for both, at float32 to save time, "
        "which does not affect the comparison\n")


def test_verify_of_an_op_that_cannot_be_run_is_not_proved(source, monkeypatch, capsys):
    monkeypatch.delitem(load_kernels(), "tanh")
    assert main(["verify", source, source]) == 1
    assert capsys.readouterr().err.startswith(
        "mil-ane-passes: not verified: the reference runtime has no kernel for: tanh"
    )


def test_passes_lists_every_rule(capsys):
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(get_all_rules())
    for rule in get_all_rules().values():
        spelt = f"ane::{rule.name}" if issubclass(rule, Rewrite) else rule.name
        (line,) = [line for line in lines if line.startswith(f"{rule.code}  {spelt} ")]
        assert line.endswith(f"  {rule.summary()}") and ("  no fix  " in line) == (not fixes_for(rule))
    assert main(["passes", "--format", "json"]) == 0
    data = strict(capsys.readouterr().out)
    assert data == json.loads(json.dumps(Catalogue(collect_pages()["rules"][:-1]).to_dict()))
    assert {row["pass"] for row in data["passes"]} == set(get_all_rules())


@pytest.mark.parametrize("key", ["ANE301", "conv-transpose-1d-bias", "ane::lift_conv_transpose_1d"])
def test_explain_shows_the_page(key, capsys):
    assert main(["explain", key]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ANE301 conv-transpose-1d-bias\npass: ane::lift_conv_transpose_1d (bitwise, preset safe)\n")
    assert "\nbefore\n" in text and "axis=-1  Position of the dummy axis" in text and "<https://" in text
    assert main(["explain", key, "--format", "json"]) == 0
    data = strict(capsys.readouterr().out)
    assert (data["schema"], data["command"], data["code"], data["options"]) == (1, "explain", "ANE301", {"axis": -1})


@pytest.mark.parametrize("key", ["ANE501", "int-inputs", "int_inputs"])
def test_explain_shows_a_rule_without_fix(key, capsys):
    assert main(["explain", key]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ANE501 int-inputs\nrule: int_inputs, no fix\n")
    assert "\nfix     " in text and "ane::int_inputs" not in text and text.count("contradicts it") == 2
    assert main(["explain", key, "--format", "json"]) == 0
    data = strict(capsys.readouterr().out)
    assert (data["fix"], data["preset"], data["exactness"], data["stage"]) == (False, None, None, None)


def test_every_page_can_be_shown(capsys):
    for rule in get_all_rules().values():
        for form in ("text", "json"):
            assert main(["explain", rule.code, "--format", form]) == 0
            assert rule.slug in capsys.readouterr().out


def test_version_and_help_name_the_commands(capsys):
    for argument, expected in (("--version", f"mil-ane-passes {__version__}"), ("--help", "rewrite")):
        with pytest.raises(SystemExit) as ended:
            main([argument])
        assert ended.value.code == 0 and expected in capsys.readouterr().out


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mil_ane_passes", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=hide_torch(),
    )


def test_the_command_itself_prints_its_answer_and_nothing_else():
    result = command("passes")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == len(get_all_rules())


def test_the_command_itself_prints_one_line_about_bad_input():
    result = command("rewrite", "missing.mlpackage", "-o", "out.mlpackage")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "mil-ane-passes: missing.mlpackage: no such file or folder; expected an .mlpackage folder saved by "
        "coremltools\n"
    )


def test_a_reader_that_leaves_early_gets_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "mil_ane_passes", "passes"],
            cwd=ROOT,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=hide_torch(),
        )
    finally:
        os.close(writing)
    assert result.stderr == "" and result.returncode == 141


@pytest.mark.parametrize("held, expected", [
    ({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)])
def test_threads_do_not_spin_unless_the_user_says_so(monkeypatch, held, expected):
    """On a machine that others use, each op waits for the other thread, which a spinning one keeps from running."""
    monkeypatch.setattr(os, "environ", dict(held))
    _keep_threads_from_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
