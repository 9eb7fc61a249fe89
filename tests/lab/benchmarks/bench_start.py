"""What starts before anything is done: our commands, on small packages or none, beside `import coremltools`.

    python -m tests.lab.benchmarks.bench_start [--rounds 3] [--record FILE.json] [--quick]

Wall times and memory of whole processes, the files in the page cache. The bounds: what needs no model (pages, lists,
settings, wrong options and targets, missing paths) takes at most a tenth of a bare `import coremltools`, a command on
a package of at most 100 ops half of it, `import mil_ane_passes` 1.2 times as long; no command takes more than 1.2 times
its memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.processes import run_and_measure
from tests.lab.benchmarks.rounds import Comparison, run_rounds

TINY = Path(__file__).parents[3] / "fixtures" / "conv_transpose_1d.mlpackage"
HOST = "import coremltools"
MAX_IMPORT_RATIO, MAX_COMMAND_RATIO, MAX_ANSWER_RATIO, MAX_MEMORY_RATIO = 1.2, 0.5, 0.1, 1.2
OPS = 100
MAKE = """import sys
from pathlib import Path
from tests.lab.benchmarks.bench_lint import make_sized_package
make_sized_package(Path(sys.argv[1]), int(sys.argv[2]))"""
ANSWERS = {
    "--version": (0, "--version"),
    "explain of a rule": (0, "explain ANE202"),
    "explain of an unknown code": (2, "explain ANE2022"),
    "passes": (0, "passes"),
    "patches": (0, "patches"),
    "config": (0, "config"),
    "lint with a wrong option": (2, f"lint {TINY} --wrong"),
    "lint for a wrong target": (2, f"lint {TINY} --target mm4"),
    "lint of a missing path": (2, "lint missing.mlpackage"),
}
"What needs no model: the exit code and the words of each."


@dataclass(frozen=True)
class Start:
    """A command to start, the exit codes that it may have, and how long it may take beside `import coremltools`."""

    command: list[str]
    codes: tuple[int, ...]
    allowed: float


def make_starts(folder: Path) -> dict[str, Start]:
    """All commands by what their rows are called; `folder` holds a package of `OPS` ops."""
    tool, target = [sys.executable, "-m", "mil_ane_passes"], str(folder / "out.mlpackage")
    sized = {"a tiny package": str(TINY), f"{OPS} ops": str(folder / f"{OPS}.mlpackage")}
    found = {"import mil_ane_passes": Start([sys.executable, "-c", "import mil_ane_passes"], (0,), MAX_IMPORT_RATIO)}
    for name, (code, words) in ANSWERS.items():
        found[name] = Start([*tool, *words.split()], (code,), MAX_ANSWER_RATIO)
    for name, path in sized.items():
        found[f"lint of {name}"] = Start([*tool, "lint", path], (0, 1), MAX_COMMAND_RATIO)
        words = ["rewrite", path, "-o", target, "--no-verify", "--overwrite"]
        found[f"rewrite --no-verify of {name}"] = Start([*tool, *words], (0,), MAX_COMMAND_RATIO)
    words = ["edit", str(TINY), "-o", target, "--rename", "waveform=renamed", "--overwrite"]
    found["edit --rename of a tiny package"] = Start([*tool, *words], (0,), MAX_COMMAND_RATIO)
    return found


def measure_startup(options: argparse.Namespace) -> Iterator[Comparison]:
    memory: dict[str, list[float]] = {}

    def once(name: str, start: Start) -> float:
        spent = run_and_measure(start.command, start.codes)
        memory.setdefault(name, []).append(spent.memory)
        return spent.seconds

    with tempfile.TemporaryDirectory() as folder:
        run_and_measure([sys.executable, "-c", MAKE, folder, str(OPS)])
        starts = {HOST: Start([sys.executable, "-c", HOST], (0,), 1.0), **make_starts(Path(folder))}
        if options.quick:
            starts = {name: starts[name] for name in (HOST, "--version", "explain of a rule", f"lint of {OPS} ops")}
        else:
            once("", starts[f"lint of {OPS} ops"])  # the files come into the page cache
            memory.clear()
        found = run_rounds({name: lambda name=name: once(name, starts[name]) for name in starts}, options.rounds)
    for name in list(starts)[1:]:
        yield Comparison(name, HOST, found[name], found[HOST], starts[name].allowed)
    most = [max(each) for each in zip(*(memory[name] for name in starts if name != HOST))]
    yield Comparison("most memory of these", HOST, most, memory[HOST], MAX_MEMORY_RATIO, "MB")


BENCHMARK = Benchmark("start", measure_startup, {"rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
