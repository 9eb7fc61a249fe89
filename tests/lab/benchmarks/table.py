"""The README's table of what `python -m tests.lab.benchmarks --record` measured last."""

from __future__ import annotations

from pathlib import Path

from tests.lab import records
from tests.lab.benchmarks.command import RECORD, format_heading, read_record, read_rows
from tests.lab.benchmarks.rounds import COLUMNS

CODE_CELLS = (
    "import coremltools",
    "import mil_ane_passes",
    "cp -r; sync",
    "cp -r",
    "rewrite --no-verify",
    "edit --rename --link",
    "edit --rename",
    "edit --io fp32",
    "ane.convert",
    "ct.convert",
    "--version",
    "explain",
    "passes",
    "patches",
    "config",
    "upgrade",
    "lint",
)
"""What stands at the beginning of a cell and is a command or a call; of two that fit the longer one is first."""


def format_table(record: Path = RECORD) -> str:
    """All comparisons: medians of both sides, the median of the rounds' ratios, and from where to where they go."""
    return records.format_table(COLUMNS, (
        _mark_code_cells(row.cells()) for entry in read_record(record).values() for row in read_rows(entry)))


def format_conditions(record: Path = RECORD) -> str:
    """Where and when all of it was measured; benchmarks that were run together are told together."""
    found = read_record(record)
    lines: dict[str, list[str]] = {}
    for name, entry in found.items():
        lines.setdefault(format_heading(entry["run"]), []).append(name)
    return "\n".join(f"- {', '.join(names)}: {line}" for line, names in lines.items())


def _mark_code_cells(cells: list[str]) -> list[str]:
    """What is code in Markdown's marks: commands and calls, which the rows name at their beginning."""
    return [*(_mark_code(cell) for cell in cells[:2]), *cells[2:]]


def _mark_code(cell: str) -> str:
    if ", then " in cell:
        return ", then ".join(_mark_code(each) for each in cell.split(", then "))
    head = next((code for code in CODE_CELLS if cell == code or cell.startswith((f"{code} ", f"{code},"))), "")
    return f"`{head}`{cell[len(head):]}" if head else cell
