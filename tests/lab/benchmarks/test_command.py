"""The umbrella runs every benchmark by its own command; the table is what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab.benchmarks import __main__ as umbrella
from tests.lab.benchmarks import bench_package as package
from tests.lab.benchmarks import table
from tests.lab.benchmarks.command import NAMES, RECORD, Benchmark, add_entries, format_heading, read_record, read_rows
from tests.lab.benchmarks.processes import run_and_measure
from tests.lab.benchmarks.rounds import Comparison, describe_machine

HERE = Path(__file__).parent
FILES = sorted(file.stem.removeprefix("bench_") for file in HERE.glob("bench_*.py"))


def make_entry(ratio: float, allowed: float | None = None, name: str = "lint of much") -> dict:
    row = Comparison(name, "cp -r", [ratio, 3 * ratio], [1.0, 3.0], allowed)
    return {"run": describe_machine() | {"load": 0.1, "busy": False}, "rows": [row.to_dict()]}


def make_toy_benchmark(allowed: float) -> Benchmark:
    return Benchmark("toy", lambda options: [Comparison("ours", "theirs", [options.size], [1.0], allowed)],
                     {"size": (2.0, 1.0)})


@pytest.mark.parametrize("quick", [False, True])
def test_the_plan_has_every_benchmark(quick, tmp_path):
    commands = umbrella.plan_commands(NAMES, quick, tmp_path / "record.json")
    assert sorted(commands) == FILES == sorted(NAMES)
    for name, command in commands.items():
        assert command[2] == f"tests.lab.benchmarks.bench_{name}" and ("--quick" in command) is quick


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_is_smaller_than_a_full_one(name):
    made = umbrella.load_benchmark(name)
    assert made.name == name and made.sizes["rounds"][0] > made.sizes["rounds"][1]
    full, quick = made.options([]), made.options(["--quick"])
    assert full.rounds == made.sizes["rounds"][0] and quick.rounds == made.sizes["rounds"][1]
    assert made.options(["--quick", "--rounds", "7"]).rounds == 7


@pytest.mark.parametrize("arguments, allowed, code", [([], 2.0, 0), ([], 1.9, 1), (["--quick"], 1.9, 0)])
def test_a_missed_bound_is_exit_code_1(arguments, allowed, code, capsys):
    assert make_toy_benchmark(allowed).main(arguments) == code
    assert ("MISSED" in capsys.readouterr().out) is bool(code)


def test_a_record_keeps_what_others_put_there(tmp_path):
    record = tmp_path / "record.json"
    add_entries(record, {"proof": make_entry(1.0), "package, 8 GB": make_entry(2.0)})
    add_entries(record, {"package": make_entry(3.0), "proof": make_entry(4.0)})
    assert list(read_record(record)) == ["package", "package, 8 GB", "proof"]
    assert [read_rows(read_record(record)[name])[0].ratio for name in read_record(record)] == [3.0, 2.0, 4.0]


def test_the_table_reads_the_record(tmp_path):
    record = tmp_path / "record.json"
    add_entries(record, {"start": make_entry(0.5, 1.2, "--version"), "package": make_entry(0.2)})
    assert table.format_table(record).splitlines()[2:] == [
        "| `--version` | `cp -r` | 1.00 s | 2.0 s | 0.50 x | 0.50 to 0.50 | 1.2 |",
        "| `lint` of much | `cp -r` | 400 ms | 2.0 s | 0.20 x | 0.20 to 0.20 |  |"]
    assert table.format_conditions(record).startswith("- start, package: ") and "load 0.1" in table.format_conditions(
        record
    )


def test_a_busy_machine_is_said_in_the_heading():
    run = describe_machine() | {"load": 9.0}
    assert "BUSY" in format_heading(run | {"busy": True}) and "BUSY" not in format_heading(run | {"busy": False})


def test_what_is_recorded_was_held_to_its_bounds():
    """The README's figures: of each benchmark, each with its bound, and none missed."""
    rows = [row for found in read_record(RECORD).values() for row in read_rows(found)]
    assert any(row.allowed for row in rows) and [row.what for row in rows if not row.holds] == []


def test_the_umbrella_names_what_is_missed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(umbrella, "RECORD", tmp_path / "record.json")
    found = {"lint": make_entry(3.0, 2.0), "start": make_entry(1.0, 2.0, "--version")}
    assert umbrella.report_results(describe_machine(), found, [], recorded=True) == 1
    said = capsys.readouterr()
    assert "MISSED: lint of much: 3.00 x cp -r, 2 allowed" in said.err and said.err.count("MISSED") == 1
    assert list(read_record(tmp_path / "record.json")) == ["start", "lint"]


def test_what_could_not_run_is_said_and_nothing_recorded(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(umbrella, "RECORD", tmp_path / "record.json")
    record = tmp_path / "found.json"
    commands = {"lint": ["sh", "-c", "echo no such file >&2; exit 1"],
                "start": ["sh", "-c", f"echo '{json.dumps({'start': make_entry(1.0)})}' > {record}"]}
    failed = list(umbrella.run_commands(commands, record))
    assert failed == ["lint could not run (1): no such file"]
    assert umbrella.report_results(describe_machine(), read_record(record), failed, recorded=True) == 2
    assert "lint could not run" in capsys.readouterr().err and not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("arguments", [["nothing"], ["--quick", "--record"]])
def test_what_cannot_be_asked_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        umbrella.main(arguments)
    assert (refused.value.code == 2 and "expected of start" in capsys.readouterr().err) or "--quick" in arguments


def test_a_process_is_timed_and_weighed():
    found = run_and_measure(["sh", "-c", "sleep 0.05; echo said; exit 3"], (3,))
    assert found.seconds >= 0.05 and found.memory > 0.1 and found.output == "said\n"
    with pytest.raises(SystemExit, match="failed with 3: why"):
        run_and_measure(["sh", "-c", "echo why >&2; exit 3"])


def test_rewrite_is_measured_beyond_the_start_up_of_its_own_round():
    names = (package.HOST, package.COPIED, package.SYNCED, package.START, package.REWRITE, package.LINT, package.EDIT,
             package.LINK)
    found = dict(zip(names, ([2.0, 4.0], [1.0, 2.0], [2.0, 8.0], [3.0, 6.0], [4.0, 5.0], [1.0, 4.0], [6.0, 3.0],
                             [2.0, 2.0])))
    rows = {(row.what, row.beside): row.ratios for row in package.compare_findings(found, found, "of it", False)}
    assert rows["rewrite --no-verify of it", "import coremltools, then cp -r"] == [4 / 3, 5 / 6]
    assert rows["rewrite --no-verify of it, beyond start-up", "cp -r"] == [1.0, 0.0]
    assert rows["edit --rename --link of it", "import coremltools"] == [1.0, 0.5]
    assert rows["most memory of rewrite, lint, edit of it", "import coremltools"] == [3.0, 1.25]
