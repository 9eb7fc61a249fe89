"""What `lint` costs on a program of many ops beyond start-up, and that it grows with the program, not faster.

    python -m tests.benchmarks.bench_lint [--ops 10000] [--rounds 3] [--record FILE.json] [--quick]

Two packages, one with a fifth of the other's ops: convolutions of rank 3, linears, activations, residual adds, a 1-D
transposed convolution in every twentieth place. Beside it stands coremltools' own reading of the same package into a
program, which `lint` does, too, before it does more. Seconds of the processor, in one thread. The bounds: `lint` takes
at most twice what coremltools takes to read the program, our own reading at most 0.8 times as long, and an op of the
large package at most 1.6 times what one of the small package takes.
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

from mil_ane_passes.cli.main import main as command
from mil_ane_passes.core.query import op_count
from mil_ane_passes.package import load
from tests.benchmarks.command import Benchmark
from tests.benchmarks.make_program import program
from tests.benchmarks.rounds import Comparison, busy, in_turn, told

ALL, READING, GROWTH = 2.0, 0.8, 1.6


def package(folder: Path, ops: int) -> Path:
    path = folder / f"{ops}.mlpackage"
    model = ct.convert(program(ops, ops // 20, dtype=np.float16), convert_to="mlprogram", skip_model_load=True,
                       compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS17,
                       pass_pipeline=ct.PassPipeline.EMPTY)
    model.save(str(path))
    return path


def lint(path: Path) -> None:
    code = command(["lint", str(path), "-o", str(path.with_suffix(".txt"))])
    if code > 1:
        raise SystemExit(code)


def read_by_host(path: Path) -> None:
    spec = ct.utils.load_spec(str(path))
    host_load(spec, specification_version=spec.specificationVersion,
              file_weights_dir=os.path.join(str(path), "Data", "com.apple.CoreML", "weights"))


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    with tempfile.TemporaryDirectory() as folder:
        lint(package(Path(folder), 20))  # start-up: what is imported and compiled once
        told(f"making packages of up to {options.ops} ops")
        small, large = (package(Path(folder), ops) for ops in (options.ops // 5, options.ops))
        counts = [op_count(load(path).program) / 1000 for path in (small, large)]
        found = in_turn({
            "lint": lambda: busy(lambda: lint(large)),
            "small": lambda: busy(lambda: lint(small)) / counts[0],
            "read": lambda: busy(lambda: load(large)),
            "host": lambda: busy(lambda: read_by_host(large)),
        }, options.rounds)
    what = f"of {options.ops:,} ops, beyond start-up"
    yield Comparison(f"lint {what}", "coremltools reads the same program", found["lint"], found["host"], ALL)
    yield Comparison(f"reading {what}", "coremltools reads the same program", found["read"], found["host"], READING)
    yield Comparison(f"lint, 1,000 of {options.ops:,} ops", f"1,000 of {options.ops // 5:,} ops",
                     [each / counts[1] for each in found["lint"]], found["small"], GROWTH)


BENCHMARK = Benchmark("lint", measure, {"ops": (10000, 1000), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
