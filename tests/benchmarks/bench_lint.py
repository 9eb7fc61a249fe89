"""What `lint` costs beyond start-up, by part, and that it grows with the program, not faster.

    python -m tests.benchmarks.bench_lint [--ops 10000] [--runs 3]

Two packages, one with a fifth of the other's ops: convolutions of rank 3, linears, activations, residual adds, a 1-D
transposed convolution in every twentieth place. The bounds: 3 s for 10,000 ops, and eight times as long for five times
the ops.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np

from mil_ane_passes.cli.main import main as command
from mil_ane_passes.core.query import op_count
from mil_ane_passes.core.selecting import configured
from mil_ane_passes.package import load
from mil_ane_passes.report.lint import LintReport
from mil_ane_passes.residency import predict
from tests.benchmarks.make_program import program

ALLOWED, GROWTH = 3.0, 8.0
PARTS = ("load", "rules and prediction", "report", "text", "json", "all")


def package(folder: Path, ops: int) -> Path:
    path = folder / f"{ops}.mlpackage"
    model = ct.convert(program(ops, ops // 20, dtype=np.float16), convert_to="mlprogram", skip_model_load=True,
                       compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS17,
                       pass_pipeline=ct.PassPipeline.EMPTY)
    model.save(str(path))
    return path


def timed(job: Callable[[], Any]) -> tuple[Any, float]:
    """What `job` gives, and the seconds of the processor it took (one thread; others may work beside)."""
    started = time.process_time()
    return job(), time.process_time() - started


def once(path: Path) -> dict[str, float]:
    """Seconds by part, each done as the command does it."""
    loaded, load_s = timed(lambda: load(path))
    (plan, found), rules_s = timed(lambda: predict(loaded.program, configured(None).values(), package=loaded))
    report, report_s = timed(lambda: LintReport.of(str(path), "all", plan, found))
    _, text_s = timed(lambda: str(report))
    _, json_s = timed(lambda: json.dumps(report.to_dict(), allow_nan=False))
    _, all_s = timed(lambda: command(["lint", str(path), "-o", str(path.with_suffix(".txt"))]))
    return dict(zip(PARTS, (load_s, rules_s, report_s, text_s, json_s, all_s)))


def measure(path: Path, runs: int) -> dict[str, float]:
    each = [once(path) for _ in range(runs)]
    return {part: statistics.median(seconds[part] for seconds in each) for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=10000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        once(package(Path(folder), 20))  # start-up: what is imported and compiled once
        for ops in (arguments.ops // 5, arguments.ops):
            path = package(Path(folder), ops)
            found.append(measure(path, arguments.runs))
            print(f"{op_count(load(path).program)} ops: " + ", ".join(f"{part} {found[-1][part]:.2f} s"
                                                                       for part in PARTS), flush=True)
    growth = found[1]["all"] / found[0]["all"]
    print(f"all: {found[1]['all']:.2f} s ({ALLOWED:g} s allowed for 10,000 ops), {growth:.1f} times the smaller "
          f"package's ({GROWTH:g} allowed)")
    sys.exit(found[1]["all"] > ALLOWED * arguments.ops / 10000 or growth > GROWTH)


if __name__ == "__main__":
    main()
