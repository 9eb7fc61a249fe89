"""What upgrading a large .mlmodel costs, beside coremltools reading and writing it once.

    python -m tests.lab.benchmarks.bench_upgrade [--gigabytes 0.5] [--rounds 3] [--folder DIR] [--record FILE.json]
                                                 [--quick]

Both are whole processes on a file that is in the page cache; `upgrade` writes weights of fp16. The bounds: at most 1.5
times the time and the memory of `coremltools.utils.load_spec`, then `save_spec`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.processes import run_and_measure
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress

MAX_RATIO = 1.5
UPGRADE, READ_AND_WRITE = "upgrade", "coremltools: load_spec, save_spec"
_SCRIPT = """
import sys
import coremltools as ct
ct.utils.save_spec(ct.utils.load_spec(sys.argv[1]), sys.argv[2])
"""


def measure_upgrade(options: argparse.Namespace) -> Iterator[Comparison]:
    """Compare both on one file, which is made in a folder of its own and removed again."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        show_progress(f"making a network of {options.gigabytes:g} GB")
        source, target = Path(folder, "in.mlmodel"), Path(folder, "out.mlpackage")
        run_and_measure([sys.executable, "-m", "tests.lab.benchmarks.make_network", str(source), "--gigabytes",
                         str(options.gigabytes)])
        commands = {UPGRADE: [sys.executable, "-m", "mil_ane_passes", "upgrade", str(source), "-o", str(target)],
                    READ_AND_WRITE: [sys.executable, "-c", _SCRIPT, str(source), str(target.with_suffix(".mlmodel"))]}
        memory: dict[str, list[float]] = {name: [] for name in commands}

        def run(name: str) -> float:
            os.sync()
            spent = run_and_measure(commands[name])
            memory[name].append(spent.memory)
            shutil.rmtree(target, ignore_errors=True)
            target.with_suffix(".mlmodel").unlink(missing_ok=True)
            return spent.seconds

        found = run_rounds({name: lambda name=name: run(name) for name in commands}, options.rounds)
    size = f"of {options.gigabytes:.1f} GB"
    yield Comparison(f"{UPGRADE} {size}", READ_AND_WRITE, found[UPGRADE], found[READ_AND_WRITE], MAX_RATIO)
    yield Comparison(f"memory of {UPGRADE} {size}", READ_AND_WRITE, memory[UPGRADE], memory[READ_AND_WRITE], MAX_RATIO,
                     "MB")


BENCHMARK = Benchmark("upgrade", measure_upgrade, {"gigabytes": (0.5, 0.02), "rounds": (3, 1), "folder": (None, None)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
