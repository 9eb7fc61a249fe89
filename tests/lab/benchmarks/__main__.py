"""All benchmarks, ours beside coremltools' in one run, and one table at the end.

    python -m tests.lab.benchmarks [NAME ...] [--quick] [--record]

Each runs in a process of its own with its own command (`python -m tests.lab.benchmarks.bench_NAME`), which says what it
measures and what it allows. `--record` writes what was found where the README's table is made from; `--quick` is for
seeing that all of it works, in a minute, and its figures are not recorded there. Exit codes: 0 all bounds hold, 1 one
was missed, 2 a benchmark could not run.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.lab.benchmarks.command import NAMES, RECORD, add_entries, format_heading, format_rows, read_record, read_rows
from tests.lab.benchmarks.rounds import describe_machine, show_progress


def plan_commands(names: Sequence[str], quick: bool, record: Path) -> dict[str, list[str]]:
    """The command of each benchmark."""
    more = ["--record", str(record), *(["--quick"] if quick else [])]
    return {name: [sys.executable, "-m", f"tests.lab.benchmarks.bench_{name}", *more] for name in names}


def run_commands(commands: dict[str, list[str]], record: Path) -> Iterator[str]:
    """Run all; what could not run is said. The benchmarks leave what they find in `record`."""
    for number, (name, command) in enumerate(commands.items()):
        show_progress(f"{number + 1} of {len(commands)}: {name}")
        done = subprocess.run(command, capture_output=True, text=True)
        if name not in read_record(record):
            yield f"{name} could not run ({done.returncode}): {done.stderr.strip()[-2000:]}"
    show_progress("")


def select_names(asked: Sequence[str]) -> list[str]:
    """What is asked for, or all. SystemExit 2 for an unknown name."""
    for name in asked:
        if name not in NAMES:
            print(f"no benchmark '{name}'; expected of {', '.join(NAMES)}", file=sys.stderr)
            raise SystemExit(2)
    return list(asked) or list(NAMES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: does it all work?")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}, from which the README's table is")
    options = parser.parse_args(arguments)
    if options.quick and options.record:
        parser.error("--quick is not recorded: its sizes are not those of the table")
    names, where = select_names(options.names), describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        failed = list(run_commands(plan_commands(names, options.quick, record), record))
        found = read_record(record)
    return report_results(where, {name: found[name] for name in names if name in found}, failed, options.record)


def report_results(where: dict[str, Any], found: dict[str, Any], failed: Sequence[str], recorded: bool) -> int:
    """Print the table and what is wrong; record it if all ran."""
    rows = [row for entry in found.values() for row in read_rows(entry)]
    print(format_heading(where), format_rows(rows), sep="\n")
    missed = [row for row in rows if not row.holds]
    for row in missed:
        print(f"MISSED: {row.what}: {row.ratio:.2f} x {row.beside}, {row.allowed:g} allowed", file=sys.stderr)
    for said in failed:
        print(said, file=sys.stderr)
    if recorded and not failed:
        add_entries(RECORD, {name: entry | {"run": where} for name, entry in found.items()})
    return 2 if failed else int(bool(missed))


def load_benchmark(name: str) -> Any:
    """The benchmark of that name."""
    return importlib.import_module(f"tests.lab.benchmarks.bench_{name}").BENCHMARK


if __name__ == "__main__":
    sys.exit(main())
