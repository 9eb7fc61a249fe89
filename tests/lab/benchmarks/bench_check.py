"""What `rewrite` with its equivalence check takes on a language model: time and memory, in a process of its own.

    python -m tests.lab.benchmarks.bench_check [--gigabytes 2.5] [--shape llm] [--rounds 2] [--folder DIR]
                                               [--record FILE.json] [--quick]

The package is made first (`make_package`), with random weights: 2.5 GB are 1.2 billion in fp16. A model of 8 billion
weights in int4 is `--gigabytes 4.5 --shape llm-int4 --rounds 1`; it has a place of its own in the record, and takes 15
minutes and 10 GB of disk in DIR. Beside the time stands that without the check, beside the memory the size of the
package.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.processes import ProcessCost, run_and_measure
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress


class CheckedRewrite:
    """Rewrites one package, with the equivalence check and without."""

    def __init__(self, source: Path) -> None:
        self._source, self._target = source, source.with_name("out.mlpackage")
        self.bytes = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        self.report: dict[str, Any] = {}
        "That of the last rewrite with the check."
        self.memory: list[float] = []

    def run(self, verify: bool) -> float:
        """Rewrite once; returns the seconds. SystemExit where nothing fires, or the check does not pass."""
        command = [sys.executable, "-m", "mil_ane_passes", "rewrite", str(self._source), "-o", str(self._target),
                   "--format", "json", *([] if verify else ["--no-verify"])]
        cost: ProcessCost = run_and_measure(command)
        shutil.rmtree(self._target)
        report = json.loads(cost.output)
        if report["status"] != "written" or not _count_matches(report):
            raise SystemExit(f"the rewrite did not go as it should: {report['status']}")
        if verify:
            if report["verify"]["status"] != "equal":
                raise SystemExit(f"the check did not go as it should: {report['verify']}")
            self.report = report
            self.memory.append(cost.memory)
        return cost.seconds


def _count_matches(report: dict[str, Any]) -> int:
    return sum(len(each["fired"]) for each in report["traces"])


def measure_check(options: argparse.Namespace) -> Iterator[Comparison]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        show_progress(f"making a package of {options.gigabytes:g} GB")
        source = Path(folder, "in.mlpackage")
        run_and_measure([sys.executable, "-m", "tests.lab.benchmarks.make_package", str(source), "--gigabytes",
                         str(options.gigabytes), "--shape", options.shape])
        rewrite = CheckedRewrite(source)
        found = run_rounds({"with": lambda: rewrite.run(True), "without": lambda: rewrite.run(False)}, options.rounds)
    size = f"{rewrite.bytes / 1e9:.1f} GB ({options.shape})"
    what = f"{rewrite.report['ops']['before']:,} ops, {_count_matches(rewrite.report):,} matches"
    yield Comparison(f"rewrite with check of {size}, {what}", "without the check", found["with"], found["without"])
    sizes = [rewrite.bytes / 1e6] * len(rewrite.memory)
    yield Comparison(f"memory of rewrite with check of {size}", "the package", rewrite.memory, sizes, unit="MB")


def get_record_name(options: argparse.Namespace) -> str:
    """Other sizes have places of their own in the record."""
    usual = options.quick or (options.gigabytes, options.shape) == (2.5, "llm")
    return "check" if usual else f"check, {options.shape} of {options.gigabytes:g} GB"


BENCHMARK = Benchmark("check", measure_check, {
    "gigabytes": (2.5, 0.1), "shape": ("llm", "tower"), "rounds": (2, 1), "folder": (None, None)}, get_record_name)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
