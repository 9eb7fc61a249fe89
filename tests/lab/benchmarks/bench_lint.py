"""What `lint_package` costs on a program of many ops beyond start-up, and that it grows with the program, not faster.

    python -m tests.lab.benchmarks.bench_lint [--ops 10000] [--rounds 3] [--record FILE.json] [--quick]

Two packages, one with a fifth of the other's ops: convolutions of rank 3, linears, activations, residual adds, a 1-D
transposed convolution in every twentieth place. Beside it stands coremltools' own reading of the same package into a
program, which `lint_package` does, too, before it does more. Seconds of the processor, in one thread. The bounds:
`lint_package` takes at most twice what coremltools takes to read the program, our own reading at most 0.8 times as
long, and an op of the large package at most 1.6 times what one of the small package takes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil.frontend.milproto.load import load as host_load

from mil_ane_passes.commands.main import main as command
from mil_ane_passes.ir.query import count_ops
from mil_ane_passes.package import load
from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.make_program import make_program
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress, time_processor

MAX_LINT_RATIO, MAX_READING_RATIO, MAX_GROWTH_RATIO = 2.0, 0.8, 1.6


def make_sized_package(folder: Path, ops: int) -> Path:
    path = folder / f"{ops}.mlpackage"
    model = ct.convert(make_program(ops, ops // 20, dtype=np.float16), convert_to="mlprogram", skip_model_load=True,
                       compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS17,
                       pass_pipeline=ct.PassPipeline.EMPTY)
    model.save(str(path))
    return path


def lint_package(path: Path) -> None:
    code = command(["lint", str(path), "-o", str(path.with_suffix(".txt"))])
    if code > 1:
        raise SystemExit(code)


def read_with_coremltools(path: Path) -> None:
    spec = ct.utils.load_spec(str(path))
    host_load(spec, specification_version=spec.specificationVersion,
              file_weights_dir=os.path.join(str(path), "Data", "com.apple.CoreML", "weights"))


def measure_lint(options: argparse.Namespace) -> Iterator[Comparison]:
    with tempfile.TemporaryDirectory() as folder:
        lint_package(make_sized_package(Path(folder), 20))  # start-up: what is imported and compiled once
        show_progress(f"making packages of up to {options.ops} ops")
        small, large = (make_sized_package(Path(folder), ops) for ops in (options.ops // 5, options.ops))
        counts = [count_ops(load(path).program) / 1000 for path in (small, large)]
        found = run_rounds({
            "lint": lambda: time_processor(lambda: lint_package(large)),
            "small": lambda: time_processor(lambda: lint_package(small)) / counts[0],
            "read": lambda: time_processor(lambda: load(large)),
            "host": lambda: time_processor(lambda: read_with_coremltools(large)),
        }, options.rounds)
    what = f"of {options.ops:,} ops, beyond start-up"
    yield Comparison(f"lint {what}", "coremltools reads the same program", found["lint"], found["host"], MAX_LINT_RATIO)
    yield Comparison(
        f"reading {what}", "coremltools reads the same program", found["read"], found["host"], MAX_READING_RATIO
    )
    yield Comparison(f"lint, 1,000 of {options.ops:,} ops", f"1,000 of {options.ops // 5:,} ops",
                     [each / counts[1] for each in found["lint"]], found["small"], MAX_GROWTH_RATIO)


BENCHMARK = Benchmark("lint", measure_lint, {"ops": (10000, 1000), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
