"""What starts before anything is done: our commands on a package of a few kilobytes, beside `import coremltools`.

    python -m tests.lab.benchmarks.bench_start [--rounds 3] [--record FILE.json] [--quick]

Wall times and memory of whole processes, the files in the page cache. The bounds: a command on a tiny package, and
`import mil_ane_passes`, take at most 1.2 times a bare `import coremltools`, `--version` a fifth of it; no command takes
more than 1.2 times its memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.processes import ProcessCost, run_and_measure
from tests.lab.benchmarks.rounds import Comparison, run_rounds

TINY = Path(__file__).parents[3] / "fixtures" / "conv_transpose_1d.mlpackage"
HOST = "import coremltools"
MAX_START_RATIO, MAX_VERSION_RATIO, MAX_MEMORY_RATIO = 1.2, 0.2, 1.2


def make_commands(folder: Path) -> dict[str, list[str]]:
    tool = [sys.executable, "-m", "mil_ane_passes"]
    target = str(folder / "out.mlpackage")
    return {
        HOST: [sys.executable, "-c", HOST],
        "import mil_ane_passes": [sys.executable, "-c", "import mil_ane_passes"],
        "--version": [*tool, "--version"],
        "lint": [*tool, "lint", str(TINY)],
        "rewrite --no-verify": [*tool, "rewrite", str(TINY), "-o", target, "--no-verify", "--overwrite"],
        "edit --rename": [*tool, "edit", str(TINY), "-o", target, "--rename", "waveform=renamed", "--overwrite"],
    }


def measure_startup(options: argparse.Namespace) -> Iterator[Comparison]:
    memory: dict[str, list[float]] = {}

    def once(name: str, command: list[str]) -> float:
        spent: ProcessCost = run_and_measure(command, (0, 1) if name == "lint" else (0,))
        memory.setdefault(name, []).append(spent.memory)
        return spent.seconds

    with tempfile.TemporaryDirectory() as folder:
        made = make_commands(Path(folder))
        if options.quick:
            made = {name: made[name] for name in (HOST, "--version", "lint")}
        else:
            once("lint", made["lint"])  # the files come into the page cache
            memory.clear()
        found = run_rounds({name: lambda name=name: once(name, made[name]) for name in made}, options.rounds)
    for name in list(made)[1:]:
        what = name if name.startswith("import") else f"{name} of a tiny package" if name[0] != "-" else name
        yield Comparison(
            what, HOST, found[name], found[HOST], MAX_VERSION_RATIO if name == "--version" else MAX_START_RATIO
        )
    most = [max(each) for each in zip(*(memory[name] for name in made if name != HOST))]
    yield Comparison("most memory of these", HOST, most, memory[HOST], MAX_MEMORY_RATIO, "MB")


BENCHMARK = Benchmark("start", measure_startup, {"rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
