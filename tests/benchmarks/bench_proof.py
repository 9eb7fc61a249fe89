"""What the proof adds to `rewrite`, counted in calls of the model with PyTorch eager.

    python -m tests.benchmarks.bench_proof [--model vocoder] [--rounds 3] [--record FILE.json] [--quick]

A model with random weights, converted to fp16, is rewritten with the preset `safe` and written, with the proof and
without. The proof runs both programs on several draws at float64 and at float16, so it costs as many calls of the
model, and wider ones. Wall times, start-up left out. The bound: what the proof adds takes at most 80 calls of eager.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import coremltools as ct
import torch

import mil_ane_passes as ane
from tests.benchmarks.command import Benchmark
from tests.benchmarks.make_models import MODELS, exported
from tests.benchmarks.rounds import Comparison, in_turn, told, wall

CALLS = 80.0


def package(name: str, folder: Path) -> Path:
    path = folder / f"{name}.mlpackage"
    made = ct.convert(exported(*MODELS[name]()), skip_model_load=True, minimum_deployment_target=ct.target.iOS17)
    made.save(str(path))
    return path


def rewrite(source: Path, verify: bool) -> None:
    report = ane.rewrite(source, source.with_name("out.mlpackage"), verify=verify, overwrite=True)
    if report.status != "written" or not report.changed or verify != (report.verify is not None):
        raise SystemExit(f"the rewrite did not go as it should: {report}")


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    model, example = MODELS[options.model]()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        told("converting")
        if not options.quick:
            rewrite(package("vocoder-small", Path(folder)), verify=True)  # what is imported and looked up once
        source = package(options.model, Path(folder))
        size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file()) / 1e6
        model(*example)
        found = in_turn({
            "eager": lambda: wall(lambda: model(*example)),
            "without": lambda: wall(lambda: rewrite(source, verify=False)),
            "with": lambda: wall(lambda: rewrite(source, verify=True)),
        }, options.rounds)
    what = f"of {options.model}, {size:.0f} MB"
    yield Comparison(f"rewrite with proof {what}", "without proof", found["with"], found["without"])
    added = [max(0.0, proved - plain) for proved, plain in zip(found["with"], found["without"])]
    yield Comparison(f"what the proof {what} adds", "one call of PyTorch eager", added, found["eager"], CALLS)


BENCHMARK = Benchmark("proof", measure, {"model": ("vocoder", "vocoder-small"), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
