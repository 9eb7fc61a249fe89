"""What the commands of all benchmarks share: their options, their table, their record and their exit code."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import records
from tests.lab.benchmarks.rounds import COLUMNS, Comparison, describe_machine, show_progress

NAMES = ("start", "package", "lint", "passes", "runtime", "convert", "proof", "check", "upgrade")
"""Every benchmark, in the order of the table; each is a file `bench_NAME.py`."""
RECORD = Path(__file__).parent / "record.json"


@dataclass(frozen=True)
class Benchmark:
    """`measure` with its options: for each the value of a full run and that of a quick one."""

    name: str
    measure: Callable[[argparse.Namespace], Iterable[Comparison]]
    sizes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    named: Callable[[argparse.Namespace], str] | None = None

    def options(self, arguments: Sequence[str] = ()) -> argparse.Namespace:
        """What is asked for; what is not said is as in a full run, or as in a quick one after `--quick`."""
        parser = argparse.ArgumentParser(
            prog=f"python -m tests.lab.benchmarks.bench_{self.name}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description=inspect.getdoc(inspect.getmodule(self.measure)),
        )
        parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
        parser.add_argument("--record", type=Path, metavar="FILE.json", help="put what is found into this record")
        for name, (full, quick) in self.sizes.items():
            kind = str if full is None else type(full)
            parser.add_argument(f"--{name}", type=kind, help=f"default: {full}, quick {quick}")
        found = parser.parse_args(arguments)
        for name, values in self.sizes.items():
            if getattr(found, name) is None:
                setattr(found, name, values[found.quick])
        return found

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure, print, record; 1 when a bound is missed."""
        options = self.options(sys.argv[1:] if arguments is None else arguments)
        run = describe_machine()
        rows = list(self.measure(options))
        show_progress("")
        name = self.named(options) if self.named else self.name
        print(format_heading(run), format_rows(rows), sep="\n", flush=True)
        if options.record:
            add_entries(options.record, {name: {"run": run, "rows": [row.to_dict() for row in rows]}})
        return int(not all(row.holds for row in rows))


def format_heading(run: Mapping[str, Any]) -> str:
    """Where and when, in a line."""
    parts = [run["machine"], run["date"], *(f"{name} {number}" for name, number in run["versions"].items())]
    if run.get("load") is not None:  # nobody looked in the oldest record
        parts.append(f"load {run['load']:.1f} at the start")
    return ", ".join(parts) + (": the machine was BUSY, and the figures are of little worth" if run["busy"] else "")


def format_rows(rows: Iterable[Comparison]) -> str:
    """The rows in columns."""
    cells = [list(COLUMNS), *(row.cells() for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def read_record(record: Path) -> dict[str, Any]:
    """What a record holds: by benchmark the run and its rows."""
    found: dict[str, Any] = records.read_record(record, {})
    return found


def read_rows(entry: Mapping[str, Any]) -> list[Comparison]:
    """The comparisons of a benchmark, as recorded."""
    return [Comparison(**row) for row in entry["rows"]]


def add_entries(record: Path, entries: Mapping[str, Any]) -> None:
    """Put `entries` into a record; what else it holds stays."""
    held = read_record(record) | dict(entries)
    ordered = {name: held[name] for name in sorted(held, key=lambda name: (NAMES.index(name.split(",")[0]), name))}
    records.write_record(record, ordered)
