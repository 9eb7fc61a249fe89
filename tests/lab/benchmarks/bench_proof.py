"""What the equivalence check adds to `rewrite_and_check`, counted in calls of the model with PyTorch eager.

    python -m tests.lab.benchmarks.bench_proof [--model vocoder] [--rounds 3] [--record FILE.json] [--quick]

A model with random weights, converted to fp16, is rewritten with the preset `safe` and written, with the equivalence
check and without. The equivalence check runs both programs on several draws at float64 and at float16, so it costs as
many calls of the model, and wider ones. Wall times, start-up left out. The bound: what the equivalence check adds
takes at most 80 calls of eager.
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
from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.make_models import MODELS, export_model
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress, time_wall

MAX_MODEL_CALLS = 80.0


def convert_and_save(name: str, folder: Path) -> Path:
    path = folder / f"{name}.mlpackage"
    made = ct.convert(export_model(*MODELS[name]()), skip_model_load=True, minimum_deployment_target=ct.target.iOS17)
    made.save(str(path))
    return path


def rewrite_and_check(source: Path, verify: bool) -> None:
    report = ane.rewrite(source, source.with_name("out.mlpackage"), verify=verify, overwrite=True)
    if report.status != "written" or not report.changed or verify != (report.verify is not None):
        raise SystemExit(f"the rewrite did not go as it should: {report}")


def measure_equivalence_check(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    model, example = MODELS[options.model]()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        show_progress("converting")
        if not options.quick:
            rewrite_and_check(
                convert_and_save("vocoder-small", Path(folder)), verify=True
            )  # what is imported and looked up once
        source = convert_and_save(options.model, Path(folder))
        size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file()) / 1e6
        model(*example)
        found = run_rounds({
            "eager": lambda: time_wall(lambda: model(*example)),
            "without": lambda: time_wall(lambda: rewrite_and_check(source, verify=False)),
            "with": lambda: time_wall(lambda: rewrite_and_check(source, verify=True)),
        }, options.rounds)
    what = f"of {options.model}, {size:.0f} MB"
    yield Comparison(f"rewrite with proof {what}", "without equivalence check", found["with"], found["without"])
    added = [max(0.0, proved - plain) for proved, plain in zip(found["with"], found["without"])]
    yield Comparison(
        f"what the equivalence check {what} adds", "one call of PyTorch eager", added, found["eager"], MAX_MODEL_CALLS
    )


BENCHMARK = Benchmark("proof", measure_equivalence_check, {"model": ("vocoder", "vocoder-small"), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
