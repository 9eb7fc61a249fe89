"""Hold saving to its promises, and record the figures: `python -m tests.lab.reliability [--quick] [--record]`.

`--record` writes tests/lab/reliability/figures.json, which the README's table is made from. REAL_PACKAGES may
name a folder of packages (see tests.package.real) that are to come back unchanged besides the fixtures. Netron reads
what was rewritten where node and the package netron are installed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.records import read_record, write_record

from ...package.real import given
from . import full_disk, kills, readers, together
from .job import SaveJob
from .rewritten import write_rewritten
from .unchanged import count_unchanged_saves

HERE = Path(__file__).parent
FIXTURES = HERE.parents[2] / "fixtures"
SEED = 7


def measure_figures(folder: Path, quick: bool, only: list[str]) -> dict[str, dict[str, Any]]:
    """The figures `only` (all, when empty), by name."""
    job = SaveJob(folder, megabytes=9 if quick else 12)
    tries, rounds, every = (2, 1, 40) if quick else (50, 10, 1)
    named: dict[str, Callable[[], dict[str, Any]]] = {
        "kills": lambda: kills.kill_at_moments(job, tries, False, SEED),
        "kills_overwrite": lambda: kills.kill_at_moments(job, tries, True, SEED + 1),
        "kill_steps": lambda: kills.kill_at_steps(job, False, every),
        "kill_steps_overwrite": lambda: kills.kill_at_steps(job, True, every),
        "limit": lambda: full_disk.try_size_limits(job, False, 12 if quick else 1),
        "limit_overwrite": lambda: full_disk.try_size_limits(job, True, 12 if quick else 1),
        "refusals": lambda: full_disk.try_disk_errors(job, False, every),
        "refusals_overwrite": lambda: full_disk.try_disk_errors(job, True, every),
        "small_disk": lambda: full_disk.try_small_disks(job, *([(8, 14)] if quick else [])),
        "processes": lambda: together.run_processes(job, rounds, False, 4 if quick else 8),
        "processes_overwrite": lambda: together.run_processes(job, rounds, True, 4 if quick else 8),
        "threads": lambda: together.run_threads(job, rounds),
    }
    written = functools.cache(lambda: write_rewritten(folder))
    if not quick:
        real = sorted((given() or Path()).glob("*.mlpackage")) if given() else []
        named["fixtures"] = lambda: count_unchanged_saves(sorted(FIXTURES.glob("*.mlpackage")), folder)
        named["real"] = lambda: count_unchanged_saves(real, folder)
        named |= {name: lambda read=read: read(written()) for name, read in readers.READERS.items()}
    found = {}
    for name, measure in named.items():
        if only and name not in only:
            continue
        begun = time.perf_counter()
        found[name] = {**measure(), "seconds": round(time.perf_counter() - begun, 1)}
        print(f"{name}: {found[name]}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.reliability", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of each, as the tests do")
    parser.add_argument("--record", action="store_true", help="write the figures")
    parser.add_argument("--only", nargs="+", default=[], help="these figures; what else is recorded stays")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures: dict[str, Any] = measure_figures(Path(folder), options.quick, options.only)
    failures = sum(figure.get("failures", 0) for figure in figures.values())
    if options.record:
        figures = {**(read_record(HERE / "figures.json") if options.only else {}), **figures}
        figures["run"] = {"command": "python -m tests.lab.reliability --record", "date": f"{datetime.date.today()}",
                          "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
        write_record(HERE / "figures.json", figures)
    print(json.dumps(figures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
