"""The README's table of what `python -m tests.lab.reliability --record` and `python -m tests.lab.fuzz` counted last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.lab import records

HERE = Path(__file__).parent
FIGURES, FUZZ = HERE / "figures.json", HERE.parent / "fuzz" / "result.json"

_ROWS = [
    ("SIGKILL at random moments", ("kills",), "no output, or a whole one"),
    ("the same, over an existing package", ("kills_overwrite",), "the old package or the new one, whole"),
    ("SIGKILL before each step on files", ("kill_steps", "kill_steps_overwrite"), "as above"),
    ("a limit on file sizes, at each border", ("limit", "limit_overwrite"),
     "a clear error and nothing left, or a whole output"),
    ("disk errors instead of each step", ("refusals", "refusals_overwrite"), "as above"),
    ("small disks that fill up", ("small_disk",), "as above"),
    ("runs to one path at once", ("processes", "threads"), "one writes it, the others say so"),
    ("the same, with overwrite", ("processes_overwrite",), "the output of one of them, whole"),
    ("packages saved as loaded", ("fixtures", "real"), "the same bytes"),
    ("rewritten packages, read by coremltools' C++ library", ("read_manifests",), "it opens and finds the model"),
    ("their weights, read by that", ("read_weights",), "the values that we read"),
    ("their models, read by protobuf in pure Python", ("read_models",), "as protobuf in C does; no unknown fields"),
    ("their functions, opened in Netron", ("read_netron",), "each op in its order; the weights' bytes"),
]


def read_figures() -> dict[str, Any]:
    """The figures by name."""
    found: dict[str, Any] = records.read_record(FIGURES)
    return found


def format_table() -> str:
    """What was tried, how often, what has to come of it, and how often it did not."""
    figures = read_figures()
    run = figures["run"]
    head = (f"tried ({run['machine']}, {run['date']})", "times", "what has to be there afterwards", "failures")
    rows: list[tuple[object, ...]] = []
    for what, names, wanted in _ROWS:
        measured = [figures[name] for name in names if figures.get(name, {}).get("tries")]
        if measured:
            failures = sum(each["failures"] for each in measured)
            rows.append((what, f"{sum(each['tries'] for each in measured):,}", wanted, failures))
    if FUZZ.exists():
        fuzz = records.read_record(FUZZ)
        rows.append(("damaged packages read (fuzzing)", f"{fuzz['tries']:,}",
                     f"{fuzz['refused']:,} refused, {fuzz['loaded']:,} loaded; no crash, at most "
                     f"{fuzz['slowest_seconds']:.1f} s and {fuzz['most_megabytes']:.0f} MB each",
                     _count_failures(fuzz["failures"])))
    return records.format_table(head, rows)


def _count_failures(failures: Any) -> int:
    return failures if isinstance(failures, int) else len(failures)
