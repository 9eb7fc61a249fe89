"""The README's table of what `python -m tests.lab.versions --record` saw last."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tests.lab.records import format_table, read_record, write_record

from .cells import CELLS, Result

__all__ = ["RESULTS", "as_table", "record", "recorded", "table"]

RESULTS = Path(__file__).with_name("results.json")


def recorded(path: Path = RESULTS) -> list[Result]:
    """What is recorded of each cell, in the order of the cells."""
    rows = {row["cell"]: Result(**row) for row in read_record(path, [])}
    return [rows[cell.name] for cell in CELLS if cell.name in rows]


def record(results: list[Result], path: Path = RESULTS) -> None:
    """Put new results in the place of those of the same cells."""
    rows = {result.cell: result for result in (*recorded(path), *results)}
    kept = [asdict(rows[cell.name]) for cell in CELLS if cell.name in rows]
    write_record(path, kept)


def table() -> str:
    """The recorded results."""
    return as_table(recorded())


def as_table(results: list[Result]) -> str:
    """One row for each cell."""
    rows: list[list[str]] = []
    for each in results:
        if each.refused:
            rows.append([each.python, "", "", "", "none", "", "", "", each.refused])
            continue
        tests = "all" if each.one_in == 1 else f"1 in {each.one_in}"
        versions = (each.python, each.numpy, each.coremltools, each.torch)
        counts = (f"{count:,}" for count in (each.passed, each.failed, each.skipped))
        rows.append([*versions, tests, *counts, f"{each.minutes:.0f}"])
    return format_table(("Python", "numpy", "coremltools", "torch", "tests", "passed", "failed", "skipped", "minutes"),
                        rows)
