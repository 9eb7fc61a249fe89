"""The command lint: its formats, gates and files, and what it says of what it cannot use."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.report.made import chain, empty, two_functions

NAMES = ["conv_transpose_1d", "nmp", "nothing_to_do"]
OP = ["function", "index", "name", "op", "output", "shape", "dtype", "ane", "predicted_backend", "est_ane_ms",
      "est_cpu_ms", "codes", "reason", "fix"]
LATENCY = ("latency_us", "latency_low_us", "latency_high_us", "latency_term", "latency_extrapolated")
SUMMARY = ["ops", "ane_supported", "predicted_on_ane", "transitions", "padded_bytes", "dense_bytes"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No settings but those a test writes."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def source(fixtures):
    return str(fixtures / "conv_transpose_1d.mlpackage")


def ran(capsys, *arguments, code=None):
    given = main(["lint", *map(str, arguments)])
    printed = capsys.readouterr()
    assert code is None or given == code, printed
    return given, printed.out, printed.err


def strict(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def refused(capsys, *arguments):
    _, out, err = ran(capsys, *arguments, code=2)
    assert out == "" and err.startswith("mil-ane-passes: ") and err.count("\n") == 1 and "internal" not in err
    return err.removeprefix("mil-ane-passes: ").rstrip("\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_package_as_text_and_as_json(name, fixtures, capsys):
    path = fixtures / f"{name}.mlpackage"
    code, out, err = ran(capsys, path)
    found = ane.lint(path)
    assert (out, err, code) == (f"{found}\n", "", 1 if found.warnings else 0)
    assert (
        out.startswith(f"{path} on every generation, ") and f" of {len(found.plan.rows)} ops (" in out.splitlines()[0]
    )
    assert " predicted on the ANE; " in out.splitlines()[0]
    data = strict(ran(capsys, path, "--format", "json", code=code)[1])
    assert data == json.loads(json.dumps(found.to_dict()))


def checked(data):
    """What every report promises, whatever the model."""
    assert {"schema", "model", "target", "ops", "findings", "segments", "summary"} <= set(data) and data["schema"] == 2
    assert set(SUMMARY) <= set(data["summary"]) and data["summary"]["ops"] == len(data["ops"])
    for each in (data["summary"], *data["ops"]):
        assert set(LATENCY) <= set(each)
        if each["latency_us"] is None:
            assert {each[key] for key in LATENCY} == {None} and each["op"].startswith("constexpr_")
        else:
            assert 0 <= each["latency_low_us"] <= each["latency_us"] <= each["latency_high_us"]
            assert each["latency_term"] and each["latency_extrapolated"] in (True, False)
    for op in data["ops"]:
        assert set(OP) <= set(op) and op["ane"] in ("yes", "no", "unknown")
        assert op["predicted_backend"] in ("ane", "cpu")
        assert op["est_cpu_ms"] >= 0 and (op["ane"] != "no" or op["est_ane_ms"] is None)
        assert op["predicted_backend"] != "ane" or op["est_ane_ms"] is not None
        assert op["reason"] and all(code.startswith("ANE") for code in op["codes"])
    for name in {op["function"] for op in data["ops"]}:
        assert [op["index"] for op in data["ops"] if op["function"] == name] == \
            list(range(sum(op["function"] == name for op in data["ops"])))
    places = {(op["function"], op["index"]) for op in data["ops"]}
    for item in data["findings"]:
        assert all((item["function"], index) in places for index in item["covers"])
        assert item["severity"] in ("wrong", "unsupported", "slow", "suggestion")
        assert item["evidence"] and item["reason"]
    assert all((part["function"], part[end]) in places for part in data["segments"] for end in ("first", "last"))
    assert data["summary"]["predicted_on_ane"] == sum(op["predicted_backend"] == "ane" for op in data["ops"])
    return data


@pytest.mark.parametrize("target", ["all", "m1", "m4"])
@pytest.mark.parametrize("name", NAMES)
def test_the_json_keeps_its_promises(name, target, fixtures, capsys):
    out = ran(capsys, fixtures / f"{name}.mlpackage", "--format", "json", "--target", target)[1]
    assert checked(strict(out))["target"] == target


@pytest.mark.parametrize("made", [two_functions, empty, lambda: chain("relu", "exp")])
def test_programs_in_memory(made):
    data = checked(json.loads(json.dumps(ane.lint(made()).to_dict(), allow_nan=False)))
    assert {op["function"] for op in data["ops"]} <= {"main", "other"}


@pytest.mark.parametrize(("name", "begins"), [
    ("r.html", "<!doctype html>"), ("r.JSON", '{'), ("r.sarif", '{'), ("r.txt", "/"), ("r", "/")])
def test_the_name_of_the_file_chooses_the_format(name, begins, source, tmp_path, capsys):
    ran(capsys, source, "-o", tmp_path / name)
    assert (tmp_path / name).read_text().lower().startswith(begins)


@pytest.mark.parametrize("form", ["text", "json", "sarif", "html"])
def test_a_file_is_written_whole(form, source, tmp_path, capsys):
    target = tmp_path / "report"
    target.write_text("old")
    code, out, err = ran(capsys, source, "--format", form, "-o", target)
    assert (
        err == ""
        and out.splitlines()[1:] == [f"written to {target}"]
        and out.startswith(f"{source} on every generation, ")
    )
    assert target.read_text() == ran(capsys, source, "--format", form, code=code)[1]
    assert os.listdir(tmp_path) == ["report"]


def test_where_nothing_can_be_written(source, fixtures, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    package = shutil.copytree(source, tmp_path / "in.mlpackage")
    assert refused(capsys, package, "-o", "folder") == "'folder' is a folder; expected the name of a file to write"
    assert "to write 'r.json' to; create it first" in refused(capsys, package, "-o", tmp_path / "no" / "r.json")
    assert "which is never modified; expected another path" in refused(capsys, package, "-o", package / "r.json")
    assert refused(capsys, package, "-o", package).endswith("is a folder; expected the name of a file to write")
    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert refused(capsys, package, "-o", tmp_path / "old").endswith(
            "(No space left on device); existing files are unchanged: free some space, or choose another disk")
    assert (tmp_path / "old").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["folder", "in.mlpackage", "old"]


@pytest.mark.parametrize("key", ["ANE301", "ane301", "ANE30", "conv-transpose-1d-bias", "lift_conv_transpose_1d",
                                 "ane::lift_conv_transpose_1d", "ANE999 , ANE301"])
def test_select_and_ignore(key, source, capsys):
    if "999" in key:
        line = refused(capsys, source, "--select", key)
        assert line.startswith("select: no rule 'ANE999'; expected a code, a code prefix such as ANE3, ")
        return
    chosen = strict(ran(capsys, source, "--select", key, "--format", "json", code=1)[1])
    codes = {item["code"] for item in chosen["findings"]}
    assert "ANE301" in codes and all(code.startswith("ANE30") for code in codes)
    left = strict(ran(capsys, source, "--ignore", key, "--format", "json")[1])
    assert "ANE301" not in {item["code"] for item in [*left["findings"], *left["near_misses"]]} and left["findings"]
    assert ran(capsys, source, "--select", key, "--ignore", key, code=0)[1].splitlines()[2] == "no findings"


def test_what_is_not_reported_still_counts(fixtures, capsys):
    path = fixtures / "nmp.mlpackage"
    whole = strict(ran(capsys, path, "--format", "json")[1])
    refusing = {item["code"] for item in whole["findings"] if item["refuses"]}
    assert "ANE502" in refusing
    quiet = strict(ran(capsys, path, "--format", "json", "--ignore", ",".join(refusing))[1])
    assert refusing.isdisjoint(item["code"] for item in quiet["findings"])
    assert quiet["summary"] == whole["summary"] and quiet["segments"] == whole["segments"]
    kept = ("ane", "predicted_backend", "reason")
    assert [[op[key] for key in kept] for op in quiet["ops"]] == [[op[key] for key in kept] for op in whole["ops"]]


def test_the_bar(source, capsys):
    share = ane.lint(source).share
    assert ran(capsys, source, "--fail-under", f"{share:g}", code=0)[2] == ""
    if share < 100:
        _, out, err = ran(capsys, source, "--fail-under", "100", code=1)
        assert err.startswith("mil-ane-passes: --fail-under: ") and err.endswith("below the limit of 100 %\n")
        assert "8 ops" in err and out


@pytest.mark.parametrize("bar", ["-1", "100.1", "most", "nan", "inf", ""])
def test_a_bar_that_is_none(bar, source, capsys):
    assert refused(capsys, source, "--fail-under", bar) == \
        f"--fail-under: found {bar!r}; expected a percentage, 0 to 100"


def test_a_share_is_not_taken_for_a_percentage(source, capsys):
    assert refused(capsys, source, "--fail-under", "0.9") == \
        "--fail-under: found '0.9', less than 1 %; expected a percentage, such as 90, or 0"


def test_a_baseline_lets_known_findings_pass(source, fixtures, tmp_path, capsys):
    ran(capsys, source, "--format", "json", "-o", "old.json", code=1)
    _, out, err = ran(capsys, source, "--baseline", "old.json", code=0)
    assert err == "" and "compared with old.json: 0 new, " in out
    data = strict(ran(capsys, source, "--baseline", "old.json", "--format", "json", code=0)[1])
    assert data["baseline"] == {"file": "old.json", "target": "all", "new": [], "gone": []}
    old = json.loads((tmp_path / "old.json").read_text())
    (lost, *_) = [item for item in old["findings"] if item["code"] == "ANE301"]
    old["findings"].remove(lost)
    old["findings"].append({"code": "ANE999", "function": "main", "op": "relu", "value": "gone_by_now"})
    (tmp_path / "old.json").write_text(json.dumps(old))
    _, out, err = ran(capsys, source, "--baseline", "old.json", code=1)
    assert err == "mil-ane-passes: --baseline: 1 finding not in old.json\n"
    assert f"%{lost['value']}" in out and "  gone: ANE999  main:%gone_by_now (relu)" in out
    assert "compared with old.json: 1 new, " in out and out.splitlines()[2].endswith(", 1 gone")


def test_a_finding_counts_as_often_as_it_is_there(source, tmp_path, capsys):
    found = ane.lint(source)
    twice = found.to_dict()
    twice["findings"] = [*twice["findings"], twice["findings"][0]]
    (tmp_path / "twice.json").write_text(json.dumps(twice))
    again = ane.lint(source, baseline=tmp_path / "twice.json")
    assert again.baseline.new == [] and again.baseline.gone == [found.findings[0].key]


def test_notes_fail_no_gate(source, tmp_path, capsys):
    found = ane.lint(source).to_dict()
    found["findings"] = [item for item in found["findings"] if item["severity"] != "suggestion"]
    (tmp_path / "old.json").write_text(json.dumps(found))
    _, out, err = ran(capsys, source, "--baseline", "old.json", code=0)
    assert err == "" and "ANE302" in out


def test_both_gates_say_which_failed(source, capsys):
    ran(capsys, source, "--format", "json", "-o", "old.json", "--ignore", "ANE301")
    share = ane.lint(source).share
    _, _, err = ran(capsys, source, "--baseline", "old.json", "--fail-under", "100", code=1)
    assert [line.split(": ")[1] for line in err.splitlines()] == \
        (["--fail-under"] if share < 100 else []) + ["--baseline"]


BASELINES = {
    "missing": (None, "baseline: no file 'old.json'; make one with `mil-ane-passes lint IN --format json -o FILE`"),
    "no JSON": ("{", "baseline: 'old.json' cannot be read as JSON ("),
    "binary": ("\x00\x01", "baseline: 'old.json' cannot be read as JSON ("),
    "deep": ("[" * 99999, "baseline: 'old.json' cannot be read as JSON ("),
    "a list": ("[]", "baseline: 'old.json' is not a lint report; "),
    "another report": ('{"schema": 1, "command": "rewrite", "findings": []}',
                       "baseline: 'old.json' is not a lint report; "),
    "SARIF": ('{"version": "2.1.0", "runs": []}', "baseline: 'old.json' is not a lint report; "),
    "another schema": ('{"schema": 3, "command": "lint", "findings": []}', "baseline: 'old.json' has schema 3; "),
    "a poor finding": ('{"schema": 1, "command": "lint", "findings": [{"code": "ANE301"}]}',
                       "baseline: a finding in 'old.json' lacks code, function, op or value; "),
}


@pytest.mark.parametrize("case", BASELINES)
def test_a_baseline_that_is_none(case, source, tmp_path, capsys):
    text, message = BASELINES[case]
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    assert refused(capsys, source, "--baseline", "old.json").startswith(message)


def test_after(source, tmp_path, capsys):
    ane.rewrite(source, tmp_path / "after.mlpackage")
    _, out, _ = ran(capsys, source, "--after", "after.mlpackage", code=1)
    lines = out.splitlines()
    assert lines[2].startswith("after: after.mlpackage on ") and lines[3].startswith("after: latency: ")
    assert lines[4].startswith("findings that fail a gate: ")
    data = strict(ran(capsys, source, "--after", "after.mlpackage", "--format", "json", code=1)[1])
    assert checked(data["after"])["model"] == "after.mlpackage" and "after" not in data["after"]
    page = ran(capsys, source, "--after", "after.mlpackage", "--format", "html", code=1)[1]
    assert page.lower().startswith("<!doctype html>") and "after.mlpackage" in page
    assert "no such file or folder" in refused(capsys, source, "--after", "none.mlpackage")


def test_settings_are_read_and_the_command_line_wins(source, tmp_path, capsys):
    (tmp_path / "setup.cfg").write_text("[mil_ane_passes]\nselect = ANE301\ntarget = m4\nfail-under = 0\n"
                                        "[mil_ane_passes.options.lift_conv_transpose_1d]\naxis = 2\n")
    data = strict(ran(capsys, source, "--format", "json", code=0)[1])
    assert data["target"] == "m4" and {item["code"] for item in data["findings"]} == {"ANE301"}
    assert all("on the width" in item["reason"] for item in data["findings"])
    data = strict(ran(capsys, source, "--format", "json", "--target", "m1", "--select", "ANE302", code=0)[1])
    assert data["target"] == "m1" and {item["code"] for item in data["findings"]} == {"ANE302"}
    data = strict(ran(capsys, source, "--format", "json", "--no-config", code=1)[1])
    assert data["target"] == "all" and {"ANE302", "ANE301"} <= {item["code"] for item in data["findings"]}
    other = tmp_path / "other.toml"
    other.write_text("[tool.mil_ane_passes]\ntarget = 'm2'\nbaseline = 'old.json'\n")
    line = refused(capsys, source, "--config", other)
    assert line.startswith(f"{other}: baseline: no file '{tmp_path / 'old.json'}'")
    line = refused(capsys, source, "--config", other, "--no-config")
    assert line.startswith("--config and --no-config exclude each other; ")


@pytest.mark.parametrize("said,message", [
    ("select = ANE301,nonsense", "select: no rule 'nonsense'; "),
    ("ignore = lift_conv_transposed_1d", "ignore: no rule 'lift_conv_transposed_1d'; "),
    ("target = m99", "target 'm99' is unknown; "),
    ("[mil_ane_passes.options.lift_conv_1]\naxis = 2", "options: no rule 'lift_conv_1'; "),
    ("[mil_ane_passes.options.ANE3]\naxis = 2", "options: 'ANE3' matches "),
    ("[mil_ane_passes.options.lift_conv_1d]\naxes = 2", "ane::lift_conv_1d: no option 'axes'; "),
    ("[mil_ane_passes.options.lift_conv_1d]\naxis = 5", "ane::lift_conv_1d: option 'axis' is '5'; "),
])
def test_settings_that_mean_nothing_name_the_file(said, message, source, tmp_path, capsys):
    (tmp_path / "setup.cfg").write_text(said if said.startswith("[") else f"[mil_ane_passes]\n{said}\n")
    assert refused(capsys, source).startswith(f"{tmp_path / 'setup.cfg'}: {message}")


@pytest.mark.parametrize("arguments,message", [
    (["no.mlpackage"], "no.mlpackage: no such file or folder; "), ([""], "no path given; "),
    (["."], "no .mlpackage or .mlmodel found in"),
    (["IN", "--target", "m"], "target 'm' is unknown; "),
    (["IN", "--select", "lift-conv"], "select: no rule 'lift-conv'; "),
    (["IN", "--ignore", "ANE301,"], "ignore: found ''; "),
    (["IN", "--select", "A"], "select: no rule 'A'; "), (["IN", "--config", "no.cfg"], "no.cfg: no such file; "),
])
def test_what_cannot_be_used(arguments, message, source, capsys):
    assert message in refused(capsys, *[source if each == "IN" else each for each in arguments])


def test_an_older_model_is_refused(tmp_path, capsys):
    (tmp_path / "a.mlmodel").write_bytes(b"\x08\x01")
    refused(capsys, tmp_path / "a.mlmodel")


def test_all_places_are_listed_when_asked_for(fixtures, capsys):
    path = fixtures / "nmp.mlpackage"
    some, every = ran(capsys, path)[1], ran(capsys, path, "--all")[1]
    assert re.search(r"\(conv\) and \d+ more$", some, re.M) and not re.search(r" and \d+ more$", every, re.M)
