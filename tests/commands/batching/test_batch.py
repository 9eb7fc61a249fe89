"""Many packages: each as the single command does it, in order, whatever happens to the others; and only once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import mil_ane_passes as ane
from mil_ane_passes import InputError, batch
from mil_ane_passes.commands.batch import BatchInterrupted
from mil_ane_passes.commands.batch_executors import InProcessExecutor
from mil_ane_passes.runtime.registry import load_kernels

from .helpers import IDLE, REWRITTEN, files, packages, shown, statuses

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def strict(report) -> dict:
    return json.loads(json.dumps(report.to_dict(), allow_nan=False))


@pytest.fixture
def two(fixtures, tmp_path):
    return packages(fixtures, tmp_path / "in", b=REWRITTEN, a=IDLE)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def again(two, out, **options):
    return statuses(batch("rewrite", two, out, verify=False, **options))


def test_executorch_programs_are_named_as_not_read(tmp_path, fixtures):
    shutil.copytree(fixtures / "nothing_to_do.mlpackage", tmp_path / "in" / "a.mlpackage")
    program = Path(shutil.copy(fixtures / "executorch" / "state.pte", tmp_path / "in"))
    report = batch("lint", tmp_path / "in", tmp_path / "out")
    assert [item.name for item in report.items] == ["a"] and report.to_dict()["skipped"] == [str(program)]
    assert str(report).endswith(f"1 ExecuTorch program not read ({program}): lint and rewrite read them, one at a time")
    (item,) = batch("lint", program, tmp_path / "out").items
    assert item.status == "failed" and item.error.startswith(f"{program}: an ExecuTorch program; expected an .mlp")


def test_each_package_is_rewritten_as_alone_and_one_failure_does_not_stop_the_rest(two, out, tmp_path):
    before = [files(path) for path in two]
    broken = tmp_path / "in/broken.mlpackage"
    broken.mkdir()
    (broken / "Manifest.json").write_text("no json")
    said = []
    report = batch("rewrite", [broken, *two, tmp_path / "missing.mlpackage"], out, progress=said.append)
    assert [(item.name, item.status, item.code) for item in report.items] == [
        ("broken", "failed", 2), ("b", "written", 0), ("a", "unchanged", 0), ("missing", "failed", 2)]
    assert report.exit_code == 2 and shown(out) == ["a.mlpackage", "b.mlpackage"]
    ane.rewrite(two[0], tmp_path / "alone.mlpackage")
    assert files(out / "b.mlpackage") == files(tmp_path / "alone.mlpackage")
    assert [files(path) for path in two] == before == [before[0], files(out / "a.mlpackage")]
    assert "cannot be read as JSON" in report.items[0].error and "no such file" in report.items[3].error
    assert report.items[1].report["verify"]["equal_bits"] and report.items[1].count == 2
    assert said[-1] == "4 of 4 done; a"


def test_the_json_has_each_report_whole_and_the_text_a_line_for_each(two, out, tmp_path):
    report = batch("rewrite", [*two, "missing.mlpackage"], out, verify=False)
    data = strict(report)
    assert list(data) == ["schema", "tool", "version", "command", "each", "folder", "exit", "counts", "seconds",
                          "items", "skipped"]
    assert (data["command"], data["each"], data["exit"]) == ("batch", "rewrite", 2)
    assert data["counts"] == {"failed": 1, "unchanged": 1, "written": 1}
    written, idle, missing = data["items"]
    alone = ane.rewrite(two[0], tmp_path / "alone.mlpackage", verify=False).to_dict()
    for key in set(alone) - {"output", "seconds", "traces"}:
        assert written["report"][key] == json.loads(json.dumps(alone[key])), key
    assert written["ops"] == {"before": alone["ops"]["before"], "after": alone["ops"]["after"]}
    assert written["bytes"] == sum(map(len, files(out / "b.mlpackage").values()))
    assert idle["count"] == 0 and missing["report"] is None and "no such file" in missing["error"]
    head, first, second, last, total = str(report).splitlines()
    assert head.split() == ["name", "status", "fired", "ops", "bytes", "seconds"]
    assert first.split()[:6] == ["b", "written", "2", "8", "->", "12"] and second.split()[:4] == ["a", "unchanged",
                                                                                                  "0", "2"]
    assert last.startswith("missing  failed") and total.endswith(": 1 failed, 1 unchanged, 1 written")


def test_what_is_not_proved_is_not_written_and_tried_again(two, out, monkeypatch):
    with monkeypatch.context() as lacking:
        lacking.delitem(load_kernels(), "tanh")
        report = batch("rewrite", two, out)
    assert statuses(report) == {"b": "not verified", "a": "unchanged"} and report.exit_code == 1
    assert "no kernel for: tanh" in report.items[0].error
    assert report.items[0].report["status"] == "not verified" and shown(out) == ["a.mlpackage"]
    assert statuses(batch("rewrite", two, out)) == {"b": "written", "a": "up to date"}


def test_lint_writes_reports_and_gates(two, out):
    report = batch("lint", two, out, report="json", select="ANE3")
    assert [(item.name, item.status, item.code) for item in report.items] == [("b", "findings", 1), ("a", "clean", 0)]
    alone = ane.lint(two[0], select="ANE3").to_dict()
    assert json.loads((out / "b.json").read_text()) == report.items[0].report == json.loads(json.dumps(alone))
    warnings = [found for found in alone["findings"] if found["severity"] != "suggestion"]
    assert report.items[0].count == len(warnings) > 0 and report.exit_code == 1
    recalled = batch("lint", two, out, report="json", select="ANE3")
    assert set(statuses(recalled).values()) == {"up to date"} and recalled.exit_code == 1
    assert recalled.items[0].report == report.items[0].report
    for form, begin in (("text", two[0]), ("html", "<!doctype html>"), ("sarif", "{")):
        gated = batch("lint", two, out, report=form, fail_under=101 if form == "html" else 0)
        assert gated.exit_code == (form == "html"), form
        assert (out / f"b.{form.replace('text', 'txt')}").read_text().lower().startswith(begin.lower())
    assert len(shown(out)) == 8


def test_a_package_below_the_limit_is_not_called_clean(two, out):
    report = batch("lint", two, out, select="ANE3", fail_under=100)
    assert [(item.status, item.code) for item in report.items] == [("findings", 1), ("below limit", 1)]
    assert str(report).endswith(": 1 below the limit, 1 with findings")


def test_a_dry_run_writes_nothing(two, out):
    report = batch("rewrite", two, None, dry_run=True)
    assert statuses(report) == {"b": "dry run", "a": "unchanged"} and not out.exists()
    assert any(trace["fired"] for trace in strict(report)["items"][0]["report"]["traces"])


def test_what_is_done_is_not_done_again(two, out):
    assert again(two, out) == {"b": "written", "a": "unchanged"}
    times = {path: path.stat().st_mtime_ns for path in out.glob("*/Manifest.json")}
    report = batch("rewrite", two, out, verify=False)
    assert set(statuses(report).values()) == {"up to date"} and report.exit_code == 0
    assert (report.items[0].count, report.items[0].ops_after, report.items[0].seconds) == (2, 12, None)
    assert strict(report)["items"][0]["report"]["status"] == "written"
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert again(two, out, again=True) == {"b": "written", "a": "unchanged"}
    assert all(path.stat().st_mtime_ns != time for path, time in times.items())


def test_a_package_that_was_touched_moved_or_copied_is_the_same(two, out, tmp_path):
    again(two, out)
    for file in Path(two[0]).rglob("*"):
        os.utime(file)
    os.rename(tmp_path / "in", tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    shutil.copytree(out, tmp_path / "results")
    for place in ("moved", "copy"):
        now = [str(tmp_path / place / Path(path).name) for path in two]
        assert set(again(now, tmp_path / "results").values()) == {"up to date"}, place


def test_a_change_of_the_content_is_seen_whatever_the_times_say(two, out):
    again(two, out)
    weights = Path(two[0], WEIGHTS)
    status, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert again(two, out) == {"b": "written", "a": "up to date"}
    assert weights.read_bytes()[-1:] in files(out / "b.mlpackage")[WEIGHTS]
    assert set(again(two, out).values()) == {"up to date"}
    Path(two[1], "extra.txt").write_text("one more file")
    assert again(two, out) == {"b": "up to date", "a": "unchanged"}


def test_large_files_are_told_by_content_only_where_that_is_worth_it(two, out, monkeypatch):
    monkeypatch.setattr("mil_ane_passes.commands.batch_records._ALWAYS_HASHED_BYTES", 0)
    again(two, out)
    assert set(again(two, out).values()) == {"up to date"}
    os.utime(Path(two[0], WEIGHTS))
    assert again(two, out) == {"b": "written", "a": "up to date"}
    batch("rewrite", two, out)
    os.utime(Path(two[0], WEIGHTS))
    assert set(statuses(batch("rewrite", two, out)).values()) == {"up to date"}


def test_other_options_another_tool_and_other_feeds_are_not_the_same(two, out, tmp_path, monkeypatch):
    again(two, out)
    assert set(again(two, out, preset="safe", target="all").values()) == {"up to date"}
    assert again(two, out, preset="full")["a"] == "unchanged"
    assert set(again(two, out, preset="full").values()) == {"up to date"}
    monkeypatch.setattr("mil_ane_passes.commands.batch_jobs.__version__", "99")
    from mil_ane_passes.commands.batch_jobs import describe_tool

    describe_tool.cache_clear()
    assert "up to date" not in again(two, out, preset="full").values()
    describe_tool.cache_clear()


def test_feeds_count_by_what_is_in_them(fixtures, out, tmp_path):
    (source,) = packages(fixtures, tmp_path / "in", b=REWRITTEN)
    feeds = shutil.copy(fixtures / "conv_transpose_1d.npz", tmp_path / "feeds.npz")
    import numpy as np

    np.savez(feeds, mel=np.load(feeds)["mel"])
    assert statuses(batch("rewrite", source, out, feeds=feeds)) == {"b": "written"}
    moved = shutil.move(feeds, tmp_path / "moved.npz")
    assert statuses(batch("rewrite", source, out, feeds=[moved])) == {"b": "up to date"}
    np.savez(moved, mel=np.load(moved)["mel"] * 2)
    assert statuses(batch("rewrite", source, out, feeds=[moved])) == {"b": "written"}


def test_what_others_put_there_stays(two, out, fixtures):
    packages(fixtures, out, b=IDLE)
    theirs = files(out / "b.mlpackage")
    report = batch("rewrite", two, out, verify=False)
    assert "was not written by a batch" in report.items[0].error and files(out / "b.mlpackage") == theirs
    assert again(two, out, overwrite=True) == {"b": "written", "a": "up to date"}
    (out / "b.mlpackage/note.txt").write_text("mine")
    report = batch("rewrite", two, out, verify=False)
    assert "was modified after a batch wrote it" in report.items[0].error and (out / "b.mlpackage/note.txt").exists()


def test_a_result_of_another_package_of_that_name_stays(two, out, fixtures, tmp_path):
    again(two, out)
    (other,) = packages(fixtures, tmp_path / "other", b=IDLE)
    report = batch("rewrite", other, out, verify=False)
    assert f"holds the result of another package, {os.path.realpath(two[0])}" in report.items[0].error
    assert again(other, out, overwrite=True) == {"b": "unchanged"}


def test_a_result_that_a_killed_run_left_is_made_again(two, out):
    again(two, out)
    record = out / ".mil-ane-passes/b.mlpackage.json"
    data = json.loads(record.read_text())
    record.write_text(json.dumps({"schema": 1, "tool": "mil-ane-passes", "state": "started"}))
    assert again(two, out) == {"b": "written", "a": "up to date"}
    assert json.loads(record.read_text()).keys() == data.keys()
    record.write_text("{")
    assert "was not written by a batch" in batch("rewrite", two, out, verify=False).items[0].error


def test_a_failure_keeps_what_was_there_and_says_so_until_it_is_fixed(two, out):
    again(two, out)
    good, made = Path(two[0], MODEL).read_bytes(), files(out / "b.mlpackage")
    Path(two[0], MODEL).write_bytes(b"\xff" + good)
    assert again(two, out) == {"b": "failed", "a": "up to date"} and files(out / "b.mlpackage") == made
    Path(two[0], MODEL).write_bytes(good)
    assert again(two, out) == {"b": "written", "a": "up to date"}


def test_the_users_stop_leaves_what_is_done(fixtures, out, tmp_path, monkeypatch):
    three = packages(fixtures, tmp_path / "in", a=IDLE, b=IDLE, c=IDLE)
    stop = iter([None, KeyboardInterrupt, None])
    rewrite = ane.rewrite

    def interrupted(*args, **options):
        if (error := next(stop)) is not None:
            raise error
        return rewrite(*args, **options)

    monkeypatch.setattr("mil_ane_passes.commands.rewrite.rewrite", interrupted)
    with pytest.raises(BatchInterrupted, match="1 of 3 done") as stopped:
        batch("rewrite", three, out)
    assert statuses(stopped.value.report) == {"a": "unchanged", "b": "not run", "c": "not run"}
    assert stopped.value.report.exit_code == 2
    monkeypatch.undo()
    assert statuses(batch("rewrite", three, out)) == {"a": "up to date", "b": "unchanged", "c": "unchanged"}


@pytest.mark.parametrize(("options", "words"), [
    ({"passes": "lift_conv_transpose"}, "did you mean 'lift_conv_transpose_1d'"),
    ({"target": "m99"}, "target 'm99' is unknown"),
    ({"presets": "full"}, "rewrite has no option 'presets' here.*did you mean 'preset'"),
    ({"ranges": "x"}, "expected NAME=LOW:HIGH"),
    ({"feeds": {"x": 1}}, "feeds: found arrays"),
    ({"feeds": "missing.npz"}, "missing.npz' cannot be read"),
    ({"options": {"a": object()}}, "stored as JSON"),
    ({"jobs": -1}, "jobs: found -1"),
])
def test_what_is_wrong_for_all_is_said_once(options, words, two, out):
    with pytest.raises(InputError, match=words):
        batch("rewrite", two, out, **options)
    assert not out.exists() or shown(out) == []


def test_places_for_results_that_cannot_be(two, out, tmp_path):
    for folder, words in ((None, "no output folder"), (two[0], "sources are never modified"),
                          (f"{two[1]}/Data/new", "sources are never modified"),
                          (tmp_path / "in", "sources are never modified")):
        with pytest.raises(InputError, match=words):
            batch("rewrite", two, folder)
    out.write_text("a file")
    with pytest.raises(InputError, match="is a file"):
        batch("rewrite", two, out)
    with pytest.raises(InputError, match="no command 'verify'"):
        batch("verify", two, tmp_path / "x")
    assert not Path(two[1], "Data/new").exists() and sorted(os.listdir(tmp_path / "in")) == ["a.mlpackage",
                                                                                            "b.mlpackage"]


@pytest.mark.parametrize(("error", "words"), [
    (OSError(28, "No space left on device", "x.npz"), "No space left on device: x.npz"),
    (RecursionError("deep"), "the model's blocks are nested too deeply for Python on this machine"),
    (MemoryError(), "not enough memory; use fewer jobs"),
    (ZeroDivisionError("by zero"), "internal error (ZeroDivisionError: by zero); nothing was written"),
])
def test_whatever_goes_wrong_with_one_is_told_of_that_one(two, out, monkeypatch, error, words):
    from mil_ane_passes.commands import lint

    whole = lint._lint_source

    def failing(src, *given):
        if src.endswith("b.mlpackage"):
            raise error
        return whole(src, *given)

    monkeypatch.setattr("mil_ane_passes.commands.lint._lint_source", failing)
    report = batch("lint", two, out)
    assert statuses(report) == {"b": "failed", "a": "clean"} and report.exit_code == 2
    assert report.items[0].error.startswith(words)
    assert shown(out) == ["a.txt"]


def test_results_that_a_worker_left_on_a_disk_of_its_own_are_not_counted(two, out):
    class Elsewhere(InProcessExecutor):
        def submit(self, fn, /, *args, **kwargs):
            future = super().submit(fn, *args, **kwargs)
            shutil.rmtree(out)
            return future

    report = batch("rewrite", two[:1], out, verify=False, executor=Elsewhere())
    (item,) = report.items
    assert (item.status, item.code, item.report_file) == ("failed", 2, None)
    assert item.error == (f"a worker reported that it wrote {out / 'b.mlpackage'}, but the file does not exist here; "
                          "workers need the same paths: use a shared file system")


def test_a_folder_that_cannot_be_made_and_an_unknown_form_are_refused(two, tmp_path):
    (tmp_path / "file").touch()
    said = r"file/out: the output folder cannot be created or written to \(Not a directory\)"
    with pytest.raises(InputError, match=said):
        batch("lint", two, tmp_path / "file" / "out")
    with pytest.raises(InputError, match="report: found 'pdf'; expected text, json, sarif, html"):
        batch("lint", two, tmp_path / "out", report="pdf")
    assert not (tmp_path / "out").exists()


def test_rules_of_layers_are_selected_as_in_lint(fixtures, tmp_path):
    path = next((fixtures / "onnx_coreml").glob("dilated_conv_ios13.mlmodel"))
    report = batch("lint", path, tmp_path / "out", report="json", select="NN1")
    assert report.exit_code in (0, 1) and [item.error for item in report.items] == [""], report
    found = json.loads((tmp_path / "out" / f"{path.stem}.json").read_text())
    assert found["findings"] == [] and all(each["code"].startswith("NN1") for each in found["network"]["findings"])
