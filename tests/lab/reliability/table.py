"""The README's table of what `python -m tests.lab.reliability --record` and `python -m tests.lab.fuzz` counted last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
]


def read_figures() -> dict[str, Any]:
    """The figures by name."""
    found: dict[str, Any] = json.loads(FIGURES.read_text())
    return found


def format_table() -> str:
    """What was tried, how often, what has to come of it, and how often it did not."""
    figures = read_figures()
    run = figures["run"]
    lines = [f"| tried ({run['machine']}, {run['date']}) | times | what has to be there afterwards | failures |",
             "|---|---|---|---|"]
    for what, names, wanted in _ROWS:
        measured = [figures[name] for name in names if figures.get(name, {}).get("tries")]
        if measured:
            lines.append(f"| {what} | {sum(each['tries'] for each in measured):,} | {wanted} | "
                         f"{sum(each['failures'] for each in measured)} |")
    if FUZZ.exists():
        fuzz = json.loads(FUZZ.read_text())
        lines.append(f"| damaged packages read (fuzzing) | {fuzz['tries']:,} | {fuzz['refused']:,} refused, "
                     f"{fuzz['loaded']:,} loaded; no crash, at most {fuzz['slowest_seconds']:.1f} s and "
                     f"{fuzz['most_megabytes']:.0f} MB each | {_count_failures(fuzz['failures'])} |")
    return "\n".join(lines)


def _count_failures(failures: Any) -> int:
    return failures if isinstance(failures, int) else len(failures)
