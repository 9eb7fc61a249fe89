"""Runs the fast tests on every supported combination of Python, numpy and coremltools.

    python -m tests.lab.versions                                   # every cell, each in a fresh virtual environment
    python -m tests.lab.versions --cells py310,py311-ct83  # these
    python -m tests.lab.versions --python /path/to/python3.12  # where an interpreter is; else python3.12 is looked for
    python -m tests.lab.versions --venvs FOLDER  # keep the environments there; those that are there serve
    python -m tests.lab.versions --one-in 20  # a sample of each file's tests
    python -m tests.lab.versions --again --record  # once more what failed in the recorded runs
    python -m tests.lab.versions --record  # keep the results, from which the README's table is made

Exit code 0 when all tests passed, 1 when some failed, 2 when a cell could not be installed or run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from .cells import CELLS, Cell, Result, named
from .run import rerun, run
from .table import as_table, record, recorded
from .venvs import Refused, made


def main() -> int:
    asked = _arguments()
    if asked.venvs is not None:
        return _matrix(asked, asked.venvs)
    with tempfile.TemporaryDirectory() as folder:
        return _matrix(asked, Path(folder))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.versions", description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=lambda text: text.split(","), metavar="NAME,...",
                        help=", ".join(cell.name for cell in CELLS))
    parser.add_argument("--python", type=Path, nargs="+", default=[], metavar="PATH", help="interpreters to use")
    parser.add_argument("--venvs", type=Path, metavar="FOLDER", help="where the environments are and stay")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="a sample: one in so many tests")
    parser.add_argument("--jobs", default=str(os.cpu_count() or 1), metavar="N", help="processes (default: one a core)")
    parser.add_argument("--again", action="store_true", help="run what failed in the recorded runs, and nothing else")
    parser.add_argument("--record", action="store_true", help="write results.json")
    asked = parser.parse_args()
    try:
        asked.cells = named(asked.cells)
    except ValueError as error:
        parser.error(f"--cells: {error}")
    if asked.one_in < 1:
        parser.error(f"--one-in: found {asked.one_in}, expected 1 or more")
    return asked


def _matrix(asked: argparse.Namespace, folder: Path) -> int:
    results = []
    before = {result.cell: result for result in recorded()}
    for cell in asked.cells:
        if asked.again and not (cell.name in before and before[cell.name].failures):
            continue
        print(f"== {cell.name}: Python {cell.python}, {', '.join(cell.pins)}", flush=True)
        results.append(_one(cell, asked, folder.resolve(), before.get(cell.name)))
        if asked.record:
            record(results[-1:])
    print(as_table(results))
    if any(result.refused for result in results):
        return 2
    return 1 if any(result.failed or not result.passed for result in results) else 0


def _one(cell: Cell, asked: argparse.Namespace, folder: Path, before: Result | None) -> Result:
    try:
        python = made(cell, [path.absolute() for path in asked.python], folder)
        return rerun(before, python) if asked.again and before else run(cell, python, asked.jobs, asked.one_in)
    except (Refused, RuntimeError) as error:
        return Result(cell.name, cell.python, refused=str(error))


if __name__ == "__main__":
    sys.exit(main())
