"""The command lint of several packages: paths, folders and patterns, their outputs, gates and exit codes."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.report.test_sarif import conforming_result

OPTIONS = ("--target", "m4", "--no-config")


@pytest.fixture
def models(made, tmp_path, monkeypatch):
    """The working directory, with models/a.mlpackage (clean), models/b/c.mlpackage (a finding), and more that is no
    package."""
    shutil.copytree(made / "clean.mlpackage", tmp_path / "models" / "a.mlpackage")
    shutil.copytree(made / "found.mlpackage", tmp_path / "models" / "b" / "c.mlpackage")
    (tmp_path / "models" / "README.md").write_text("not a model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def ran(capsys, *arguments, code):
    given = main(["lint", *map(str, arguments), *OPTIONS])
    printed = capsys.readouterr()
    assert given == code, printed
    return printed.out, printed.err


def refused(capsys, *arguments):
    out, err = ran(capsys, *arguments, code=2)
    assert out == "" and err.startswith("mil-ane-passes: ") and err.count("\n") == 1 and "internal" not in err
    return err.removeprefix("mil-ane-passes: ").rstrip("\n")


def damage(models):
    """Cut the program of models/a.mlpackage."""
    (file,) = (models / "a.mlpackage").rglob("model.mlmodel")
    file.write_bytes(file.read_bytes()[:20])


@pytest.mark.parametrize("given", [["models"], ["models/**"], ["models/b/../a.mlpackage", "models/b"],
                                   ["models/a.mlpackage", "models/b/c.mlpackage", "models/./a.mlpackage"]])
def test_the_text_has_the_report_of_each_package_and_a_line_of_summary(given, models, capsys):
    out, err = ran(capsys, *given, code=1)
    first, second = [line.partition(" on m4: ")[0] for line in out.splitlines() if " on m4: " in line and
                     not line.startswith("latency")]
    assert os.path.samefile(first, "models/a.mlpackage") and os.path.samefile(second, "models/b/c.mlpackage")
    assert out == (f"{ane.lint(first, target='m4')}\n\n{ane.lint(second, target='m4')}\n\n"
                   f"{out.splitlines()[-1]}\n") and err == ""
    assert out.splitlines()[-1].startswith("2 packages: 1 finding in 1 of them (1 unsupported), ")
    assert out.splitlines()[-1].endswith(" of 3 ops predicted on the ANE")


def test_a_pattern_that_matches_one_package_and_a_folder_with_one_are_several(models, capsys):
    for given in ("models/?.mlpackage", "models/b"):
        out, _ = ran(capsys, given, "--format", "json", code=0 if "?" in given else 1)
        assert len(json.loads(out)["reports"]) == 1
    assert "reports" not in json.loads(ran(capsys, "models/a.mlpackage", "--format", "json", code=0)[0])


def test_the_json_of_several(models, capsys):
    out, err = ran(capsys, "models", "--format", "json", code=1)
    data = json.loads(out)
    assert (data["schema"], data["tool"], data["command"], data["target"]) == (2, "mil-ane-passes", "lint", "m4")
    assert [each["model"] for each in data["reports"]] == ["models/a.mlpackage", "models/b/c.mlpackage"]
    assert data["reports"] == [json.loads(json.dumps(ane.lint(each["model"], target="m4").to_dict()))
                               for each in data["reports"]]
    assert data["failed"] == [] and err == ""
    assert data["summary"] == {
        "packages": 2, "with_findings": 1, "findings": 1, "ops": 3, "failed": 0, "ignored": 0,
        "severities": {name: sum(item["severity"] == name for each in data["reports"] for item in each["findings"])
                       for name in ("wrong", "unsupported", "slow", "suggestion")},
        "predicted_on_ane": sum(each["summary"]["predicted_on_ane"] for each in data["reports"])}


def test_the_sarif_of_several_is_one_run(models, capsys):
    out, _ = ran(capsys, "models", "--format", "sarif", code=1)
    (run,) = json.loads(out)["runs"]
    uris = [each["location"]["uri"] for each in run["artifacts"]]
    assert uris == ["models/a.mlpackage", "models/b/c.mlpackage"]
    rules = run["tool"]["driver"]["rules"]
    assert [each["id"] for each in rules] == sorted({each["ruleId"] for each in run["results"]})
    for result in run["results"]:
        conforming_result(result, rules)
        (location,) = result["locations"]
        artifact = location["physicalLocation"]["artifactLocation"]
        assert artifact["uri"] == uris[artifact["index"]]
    assert {each["locations"][0]["physicalLocation"]["artifactLocation"]["index"] for each in run["results"]
            if each["level"] != "note" and each["kind"] == "fail"} == {1}
    assert run["invocations"] == [{"executionSuccessful": True}]
    assert [each["model"] for each in run["properties"]["models"]] == uris
    alone = json.loads(ran(capsys, "models/b/c.mlpackage", "--format", "sarif", code=1)[0])["runs"][0]["results"]
    assert {each["partialFingerprints"]["milAnePasses/v1"] for each in alone} <= {
        each["partialFingerprints"]["milAnePasses/v1"] for each in run["results"]}


def test_one_that_cannot_be_read_does_not_keep_the_others_from_being_looked_at(models, capsys):
    damage(models)
    out, err = ran(capsys, "models", "missing.mlpackage", "none/*", code=2)
    assert out.startswith("models/b/c.mlpackage on m4: ") and out.splitlines()[-1].endswith(
        "; 3 packages could not be read") and \
        out.splitlines()[-1].startswith("1 package: 1 finding (1 unsupported), ")
    first, second, third = err.splitlines()
    assert first.startswith("mil-ane-passes: models/a.mlpackage: ") and "internal" not in first
    assert second.startswith("mil-ane-passes: missing.mlpackage: no such file or folder; ")
    assert third == "mil-ane-passes: none/*: no path matches this pattern; expected at least one .mlpackage"


def test_what_could_not_be_read_is_in_json_and_sarif(models, capsys):
    damage(models)
    data = json.loads(ran(capsys, "models", "--format", "json", code=2)[0])
    (failed,) = data["failed"]
    assert failed["model"] == "models/a.mlpackage" and failed["error"].startswith("models/a.mlpackage: ")
    assert [each["model"] for each in data["reports"]] == ["models/b/c.mlpackage"] and data["summary"]["failed"] == 1
    (run,) = json.loads(ran(capsys, "models", "--format", "sarif", code=2)[0])["runs"]
    assert run["invocations"] == [{"executionSuccessful": False, "toolExecutionNotifications": [
        {"level": "error", "message": {"text": failed["error"]}}]}]
    assert [each["location"]["uri"] for each in run["artifacts"]] == ["models/b/c.mlpackage"]


@pytest.mark.parametrize("form", ["text", "json", "sarif"])
def test_a_file_has_what_would_be_printed(form, models, capsys):
    printed, _ = ran(capsys, "models", "--format", form, code=1)
    out, err = ran(capsys, "models", "--format", form, "-o", "report", code=1)
    first, second, summary, last = out.splitlines()
    assert first.startswith("models/a.mlpackage on m4: ") and second.startswith("models/b/c.mlpackage on m4: ")
    assert summary.startswith("2 packages: ") and last == "written to report" and err == ""
    with open("report", encoding="utf-8") as file:
        assert file.read() == printed


def test_names_cannot_forge_lines(models, capsys):
    (models / "a.mlpackage").rename(models / "a\n2 packages: none.mlpackage")
    out, _ = ran(capsys, "models", code=1)
    assert out.startswith("models/a\\n2 packages: none.mlpackage on m4: ")
    damage(models := shutil.copytree(models / "a\n2 packages: none.mlpackage", models / "a.mlpackage").parent)
    (models / "a.mlpackage").rename(models / "d\nwritten to x.mlpackage")
    _, err = ran(capsys, "models", code=2)
    assert err.count("\n") == 1 and "models/d\\nwritten to x.mlpackage" in err


@pytest.mark.parametrize("given", ["models", "models/*.mlpackage"])
@pytest.mark.parametrize("options,message", [
    (["--format", "html"], "--format html writes a page about one package; expected the path of one package, or use "),
    (["--after", "b.mlpackage"], "--after applies to one package; expected its path, not a folder or pattern"),
    (["--measured", "r.json"], "--measured applies to one package; expected its path, not a folder or pattern"),
])
def test_options_of_one_package(given, options, message, models, capsys):
    assert refused(capsys, given, *options).startswith(message)


def test_what_is_wrong_for_every_package_is_said_once(models, capsys):
    assert refused(capsys, "models", "--select", "nonsense").startswith("select: no rule 'nonsense'; ")
    assert refused(capsys, "models", "none/*.mlpackage", "--fail-under", "most").startswith("--fail-under: found")
    assert refused(capsys, "models", "").startswith("no path given; ")
    assert refused(capsys, "none/*.mlpackage").startswith("none/*.mlpackage: no path matches this pattern; ")
    (models / "n.mlmodel").write_text("not a model")
    assert "is read by this run" in refused(capsys, "models", "-o", "models/n.mlmodel")
    (models.parent / "setup.cfg").write_text("[mil_ane_passes]\ntarget = m99\n")
    assert main(["lint", "models"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mil-ane-passes: {models.parent / 'setup.cfg'}: target 'm99' is unknown; ")


def test_the_bar_is_for_each_package(models, capsys):
    shares = [ane.lint(each, target="m4").share for each in ("models/a.mlpackage", "models/b/c.mlpackage")]
    assert ran(capsys, "models", "--fail-under", "0", code=0)[1] == ""
    _, err = ran(capsys, "models", "--fail-under", "100", code=1)
    assert [line.partition(": --fail-under: ")[0] for line in err.splitlines()] == [
        f"mil-ane-passes: {path}" for path, share in zip(("models/a.mlpackage", "models/b/c.mlpackage"), shares)
        if share < 100]
    damage(models)
    assert len(ran(capsys, "models", "--fail-under", "100", code=2)[1].splitlines()) == 2


def test_the_baseline_of_several_has_a_report_of_each(models, capsys, monkeypatch):
    ran(capsys, "models", "--format", "json", "-o", "old.json", code=1)
    out, err = ran(capsys, "models", "--baseline", "old.json", code=0)
    assert err == "" and out.count("compared with old.json: 0 new, ") == 2
    assert out.splitlines()[-1].startswith("2 packages: 0 findings, 0 suggestions; ")
    shutil.copytree(models / "b" / "c.mlpackage", models / "b" / "new.mlpackage")
    out, err = ran(capsys, "models", "--baseline", "old.json", code=1)
    assert err == ("mil-ane-passes: models/b/new.mlpackage: --baseline: 1 finding not in old.json\n")
    assert "  the baseline has no report of this package, so all findings are new" in out.splitlines()
    data = json.loads(ran(capsys, "models", "--baseline", "old.json", "--format", "json", code=1)[0])
    assert [each["baseline"].get("missing", False) for each in data["reports"]] == [False, False, True]
    monkeypatch.chdir(models)
    ran(capsys, "b/c.mlpackage", "--baseline", "../old.json", code=1)  # paths count from where the command runs


def test_the_baseline_of_several_is_that_of_one_of_them(models, capsys):
    ran(capsys, "models", "--format", "json", "-o", "old.json", code=1)
    ran(capsys, models / "b" / "c.mlpackage", "--baseline", "old.json", code=0)
    shutil.copytree(models / "b" / "c.mlpackage", "other.mlpackage")
    out, _ = ran(capsys, "other.mlpackage", "--baseline", "old.json", code=1)
    assert "  the baseline has no report of this package, so all findings are new" in out.splitlines()


def test_the_baseline_of_one_package_is_of_that_one_among_several(models, capsys):
    ran(capsys, "models/b/c.mlpackage", "--format", "json", "-o", "old.json", code=1)
    ran(capsys, "models", "--baseline", "old.json", code=0)
    shutil.copytree(models / "b" / "c.mlpackage", "other.mlpackage")
    ran(capsys, "other.mlpackage", "--baseline", "old.json", code=0)  # alone: the baseline of any one package
    ran(capsys, "models", "other.mlpackage", "--baseline", "old.json", code=1)


@pytest.mark.parametrize("reports,message", [
    ([{"findings": []}], "baseline: a report in 'old.json' lacks its model; "), ([3], "baseline: a report in "),
    ([{"model": "a", "findings": 3}], "baseline: a finding in 'old.json' lacks code, function, op or value; "),
    ([{"model": "a"}], "baseline: a finding in 'old.json' lacks code, function, op or value; "),
])
def test_a_baseline_of_several_that_is_none(reports, message, models, capsys):
    with open("old.json", "w") as file:
        json.dump({"schema": 1, "command": "lint", "reports": reports}, file)
    assert refused(capsys, "models", "--baseline", "old.json").startswith(message)


def test_equal_names_in_different_folders(models, capsys):
    shutil.copytree(models / "a.mlpackage", models / "b" / "a.mlpackage")
    assert ran(capsys, "models/a.mlpackage", "models/b/a.mlpackage", code=0)[0].splitlines()[-1].startswith(
        "2 packages: 0 findings, ")


@pytest.mark.parametrize("given,packages", [("models", "2 packages: 1 finding in 1 of them (1 unsupported), "),
                                            ("models/b/c.mlpackage", "1 package: 1 finding (1 unsupported), ")])
def test_concise_prints_a_line_for_each_finding_and_a_summary_beside(given, packages, models, capsys):
    out, err = ran(capsys, given, "--format", "concise", code=1)
    assert err.startswith(f"mil-ane-passes: {packages}") and err.count("\n") == 1
    (line,) = [line for line in out.splitlines() if " unsupported: " in line]
    assert line.startswith("models/b/c.mlpackage:sums: ANE205 cumsum unsupported: cumsum is ")
    assert line.endswith("; fix: triangle_cumsum (changes rounding)")
    assert all(" suggestion: " in each for each in out.splitlines() if each != line)


def test_concise_of_nothing_prints_nothing(models, capsys):
    ran(capsys, "models", "--format", "json", "-o", "old.json", code=1)
    out, err = ran(capsys, "models", "--format", "concise", "--baseline", "old.json", code=0)
    assert out == "" and err.startswith("mil-ane-passes: 2 packages: 0 findings, 0 suggestions; ")
    out, err = ran(capsys, "models", "--format", "concise", "--baseline", "old.json", "-o", "report", code=0)
    assert out.splitlines()[2:] == [err_line.removeprefix("mil-ane-passes: ") for err_line in
                                    ran(capsys, "models", "--format", "concise", "--baseline", "old.json",
                                        code=0)[1].splitlines()] + ["written to report"]
    assert os.path.getsize("report") == 0 and err == ""


def test_github_makes_errors_of_gates_and_of_what_could_not_be_read(models, capsys):
    damage(models)
    out, err = ran(capsys, "models", "--format", "github", "--fail-under", "100", code=2)
    warnings = [line for line in out.splitlines() if line.startswith("::warning ")]
    assert len(warnings) == 1 and warnings[0].startswith(
        "::warning title=ANE205 cumsum,file=models/b/c.mlpackage::models/b/c.mlpackage:sums: ANE205 ")
    gate, failed = (line for line in out.splitlines() if line.startswith("::error "))
    assert gate.startswith("::error title=mil-ane-passes lint::models/b/c.mlpackage: --fail-under: ")
    assert " %25) are predicted " in gate and failed.startswith(
        "::error title=mil-ane-passes lint::models/a.mlpackage: ")
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["mil-ane-passes"] * 3


def test_github_makes_an_error_of_a_single_package_that_cannot_be_read(models, capsys):
    out, err = ran(capsys, "missing.mlpackage", "--format", "github", code=2)
    assert out.startswith("::error title=mil-ane-passes lint::missing.mlpackage: no such file or folder; ")
    assert err.startswith("mil-ane-passes: missing.mlpackage: no such file or folder; ")


def test_statistics_count_the_findings_of_each_rule(models, capsys):
    shutil.copytree(models / "b" / "c.mlpackage", models / "d.mlpackage")
    out, err = ran(capsys, "models", "--statistics", code=1)
    findings, kinds, summary = out.split("\n\n")
    head, *rows = findings.splitlines()
    assert head.split() == ["count", "code", "rule", "severity", "packages", "fixed", "by"] and err == ""
    assert summary.startswith("3 packages: 2 findings in 2 of them (2 unsupported), ")
    counts = [int(row.split()[0]) for row in rows]
    assert counts == sorted(counts, reverse=True)
    assert ["2", "ANE205", "cumsum", "unsupported", "2", "triangle_cumsum"] in [row.split() for row in rows]
    reports = [ane.lint(path, target="m4") for path in models.rglob("*.mlpackage")]
    assert sum(counts) == sum(len(each.findings) for each in reports)
    head, *rows, basis = kinds.splitlines()
    assert head.split() == ["op", "on", "the", "ANE", "estimate", "on", "the", "CPU", "estimate"]
    ops = [row.op.op_type for each in reports for row in each.plan.rows]
    assert basis.startswith("estimates of Core ML's segmenter") and {row.split()[0] for row in rows} == set(ops)


def test_statistics_have_no_sizes(models, capsys):
    err = ran(capsys, "models", "--statistics", "--sizes", code=2)[1]
    assert "--statistics does not support --sizes; remove one of them" in err


@pytest.mark.parametrize("other", [["--sizes"], ["--after", "models/b/c.mlpackage"]])
@pytest.mark.parametrize(("output", "form"), [
    (["--format", "sarif"], "sarif"), (["-o", "r.sarif"], "sarif"), (["--format", "concise"], "concise"),
    (["--format", "github"], "github")])
def test_outputs_of_findings_refuse_what_they_would_leave_out(models, capsys, output, form, other):
    err = ran(capsys, "models/b/c.mlpackage", *output, *other, code=2)[1]
    assert f"--format {form} does not support {other[0]}; remove one of them" in err


def test_statistics_as_json_and_of_one_package(models, capsys):
    data = json.loads(ran(capsys, "models/b/c.mlpackage", "--statistics", "--format", "json", code=1)[0])
    assert (data["schema"], data["command"], data["target"]) == (2, "lint", "m4")
    assert data["failed"] == [] and data["summary"]["packages"] == 1
    (row,) = [row for row in data["statistics"] if row["severity"] != "suggestion"]
    assert row == {"code": "ANE205", "slug": "cumsum", "severity": "unsupported", "count": 1, "packages": 1,
                   "fixable": 1, "fixes": {"triangle_cumsum": 1}}
    assert "op_kinds_after" not in data


def test_statistics_count_the_ops_of_each_type_per_backend(models, capsys):
    ane.rewrite("models/b/c.mlpackage", "after.mlpackage", preset="full", target="m4")
    given = ["models/b/c.mlpackage", "--after", "after.mlpackage", "--statistics"]
    data = json.loads(ran(capsys, *given, "--format", "json", code=1)[0])
    for kinds, path in (("op_kinds", "models/b/c.mlpackage"), ("op_kinds_after", "after.mlpackage")):
        rows = ane.lint(path, target="m4").plan.rows
        assert sum(kind["est_ane_ms"] + kind["est_cpu_ms"] for kind in data[kinds]) == pytest.approx(
            sum(row.cost.of(row.engine) for row in rows))
        assert {kind["op"]: (kind["on_ane"], kind["on_cpu"]) for kind in data[kinds]} == {
            row.op.op_type: tuple(sum(other.op.op_type == row.op.op_type and other.backend == backend for other in rows)
                                  for backend in ("ane", "cpu")) for row in rows}
    lines = ran(capsys, *given, code=1)[0].splitlines()
    assert any(line.split()[0] == "cumsum" and "1 -> 0" in line for line in lines if line)


def test_statistics_with_a_baseline_a_file_and_what_cannot_be_read(models, capsys):
    ran(capsys, "models", "--format", "json", "-o", "old.json", code=1)
    out, _ = ran(capsys, "models", "--statistics", "--baseline", "old.json", code=0)
    assert out.startswith("op ") and out.splitlines()[-1].startswith("2 packages: 0 findings, 0 suggestions; ")
    damage(models)
    printed, err = ran(capsys, "models", "--statistics", code=2)
    assert printed.endswith("; 1 package could not be read\n") and "models/a.mlpackage: " in err
    ran(capsys, "models", "--statistics", "-o", "counts", code=2)
    with open("counts", encoding="utf-8") as file:
        assert file.read() == printed
    (failed,) = json.loads(ran(capsys, "models", "--statistics", "--format", "json", code=2)[0])["failed"]
    assert failed["model"] == "models/a.mlpackage"


@pytest.mark.parametrize("form", ["sarif", "html", "concise", "github"])
def test_statistics_have_two_formats(form, models, capsys):
    assert refused(capsys, "models/a.mlpackage", "--statistics", "--format", form) == (
        f"--statistics: found --format {form}; expected text or json")


@pytest.mark.parametrize("fail_on,code", [
    ("wrong", 0), ("unsupported", 1), ("slow", 1), ("suggestion", 1), ("never", 0), (None, 1)])
def test_fail_on_moves_the_line(fail_on, code, models, capsys):
    given = [] if fail_on is None else ["--fail-on", fail_on]
    _, err = ran(capsys, "models", *given, code=code)
    messages = [line for line in err.splitlines() if "--fail-on" in line]
    assert bool(messages) == bool(code and given)
    if fail_on == "unsupported":
        assert messages == ["mil-ane-passes: models/b/c.mlpackage: --fail-on unsupported: 1 finding of this severity "
                            "or worse"]


def test_fail_on_stands_beside_the_other_gates(models, capsys):
    ran(capsys, "models", "--format", "json", "-o", "old.json", code=1)
    ran(capsys, "models", "--baseline", "old.json", "--fail-on", "suggestion", code=0)
    ran(capsys, "models", "--fail-under", "0", code=0)
    ran(capsys, "models", "--fail-under", "0", "--fail-on", "unsupported", code=1)
    ran(capsys, "models", "--fail-under", "100", "--fail-on", "never", code=1)


def test_fail_on_in_the_settings_file_and_its_mistakes(models, capsys):
    settings = models.parent / "setup.cfg"
    settings.write_text("[mil_ane_passes]\nfail-on = wrong\n")
    assert main(["lint", "models"]) == 0 and main(["lint", "models", "--fail-on", "slow"]) == 1
    capsys.readouterr()
    assert refused(capsys, "models", "--fail-on", "slwo").startswith("--fail-on: found 'slwo'; expected wrong, ")
    settings.write_text("[mil_ane_passes]\nfail-on = bad\n")
    assert main(["lint", "models"]) == 2
    assert capsys.readouterr().err.startswith(f"mil-ane-passes: {settings}: fail-on: found 'bad'; expected wrong")


def test_a_baseline_of_the_first_schema_is_read(models, capsys):
    ran(capsys, "models", "--format", "json", "-o", "old.json", code=1)
    with open("old.json", encoding="utf-8") as file:
        data = json.load(file)
    for item in (item for each in data["reports"] for item in each["findings"]):
        item["level"] = "warning" if item.pop("severity") != "suggestion" else "note"
    data["schema"] = 1
    with open("old.json", "w", encoding="utf-8") as file:
        json.dump(data, file)
    ran(capsys, "models", "--baseline", "old.json", code=0)
